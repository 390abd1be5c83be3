"""Products with FP8 or plain weights, and the steps between them that leave their result quantised."""
