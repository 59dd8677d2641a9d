"""Models of Hugging Face folders."""
