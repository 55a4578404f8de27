"""Label propagation, scores, benchmarks, encoders in and out."""
