"""Models of transformers and mlx-lm: how their files are read, and attention within the documents of a pack."""
