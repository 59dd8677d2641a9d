"""The main job: what `megapack train` runs, from a config to checkpoints.

It stands on the core (the rooms beside this folder), which plans and runs without it. A loop of
one's own may take any part: the model (`gpt`), weights of Hugging Face folders (`hf`), rollouts
from files (`data`), checkpoints.
"""
