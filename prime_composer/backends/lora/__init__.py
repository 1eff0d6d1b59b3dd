"""LoRA students: the adapter that trains, and the models that it and its base make."""
