"""Results of a run in the formats of other libraries: peft, mlx-lm, Hugging Face directories, MLX in 4 bits."""
