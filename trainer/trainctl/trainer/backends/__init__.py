"""The array libraries behind one protocol: torch and MLX hold the model, its optimizer and its memory."""
