"""Models with images: the tower that encodes them, and the decoder that reads the features.

    pixels -> tower -> features [levels, tokens, H] -> (schedule.ahead sends them) -> decoder

Modules:
    tower: VisionTower: transformers' module, replicated on every rank
    features: FeatureTable, RowFeatures, RowImages: what the decoder reads, and the gradients back
    decoder: hooks that put features into the decoder's layers
    mrope: Mrope: rotary lines of frames, rows and columns
"""
