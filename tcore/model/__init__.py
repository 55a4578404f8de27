"""Networks and pure math: encoders, decoders, heads, losses, clustering."""
