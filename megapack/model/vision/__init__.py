"""Models with images: the tower that encodes them, and the decoder that reads the features.

    pixels -> tower -> features [levels, tokens, H] -> (schedule.vision sends them) -> decoder

Modules:
    tower: VisionTower: transformers' module, replicated on every rank
    features: Features: what the decoder reads, and the gradients that come back
    decoder: hooks that put features into the decoder's layers
    mrope: Mrope: rotary lines of frames, rows and columns
"""
