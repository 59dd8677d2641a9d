"""Any layout and model against one unpadded sample at a time."""
