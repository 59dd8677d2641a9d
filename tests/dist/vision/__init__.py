"""Models with images, against transformers' own model that runs one unpadded sample at a time."""
