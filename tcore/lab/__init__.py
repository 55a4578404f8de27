"""`tcore lab`: rows of an ablation, or methods, trained and scored in one table."""
