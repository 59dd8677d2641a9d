"""Sizes of a tower for images: parameters, FLOPs and bytes.

With d channels, an MLP of f and n patches, a block has 4 d^2 + 2 d f parameters in matrices (3 d f
with a gate), each of which takes 2 FLOPs per patch, and attention 4 d n FLOPs per patch. A merger
turns m x m patches into a feature: (m^2 d)^2 + m^2 d h parameters for h channels.
"""

from __future__ import annotations

from dataclasses import dataclass

CALL_PATCHES = {False: 1 << 13, True: 1 << 16}
"""Patches of one call of a tower, without and with recomputation. A backward needs the activations
of a call: 8,192 patches are 2 images of 1,024 x 1,024 pixels, and 7 GiB in Qwen3-VL-8B's tower;
65,536 with recomputation 4 GiB. Chosen by hand."""


@dataclass(frozen=True, kw_only=True)
class TowerSizes:
    """A tower of transformers' Qwen families. Qwen3-VL-8B's:

    >>> sizes = TowerSizes(
    ...     depth=27, width=1152, mlp_width=4304, is_gated=False, patch_numbers=1536,
    ...     num_positions=2304, merge=2, out_width=4096, num_levels=4, full_blocks=27)
    >>> sizes.parameters
    576388336
    >>> per_patch, per_patch_sq = sizes.coefficients(1.0, 1.0)
    >>> f"{4 * (per_patch + 4096 * per_patch_sq):.2e} operations per feature"
    '5.66e+09 operations per feature'
    """

    depth: int
    width: int
    mlp_width: int
    is_gated: bool
    """Whether the MLP has a gate, and norms no bias (Qwen2.5-VL)."""
    patch_numbers: int
    """Numbers of a patch."""
    num_positions: int
    """Of the learned grid; 0: none."""
    merge: int
    """Patches of a feature in each direction."""
    out_width: int
    """Channels of a feature."""
    num_levels: int
    """Features per image token: 1, and those of DeepStack."""
    full_blocks: int
    """Blocks that attend within the whole image; the others within windows."""
    window_patches: int = 0
    """Patches of a window."""
    element_bytes: int = 2
    """Of a weight and of an activation."""

    @property
    def _block(self) -> int:
        """Parameters of a block's matrices."""
        return 4 * self.width**2 + (3 if self.is_gated else 2) * self.width * self.mlp_width

    @property
    def _merger(self) -> int:
        inner = self.merge**2 * self.width
        return inner**2 + inner * self.out_width

    @property
    def parameters(self) -> int:
        """Of the whole tower, mergers included."""
        per_norm = 1 if self.is_gated else 2
        inner = self.merge**2 * self.width
        biases = 5 * self.width + (2 if self.is_gated else 1) * self.mlp_width
        block = self._block + biases + 2 * per_norm * self.width
        merger = self._merger + inner + self.out_width
        # DeepStack's mergers norm what is merged.
        norms = per_norm * (self.width + (self.num_levels - 1) * inner)
        embedding = (self.patch_numbers + self.num_positions) * self.width
        embedding += 0 if self.is_gated else self.width
        return self.depth * block + self.num_levels * merger + norms + embedding

    def coefficients(self, product_speed: float, attention_speed: float) -> tuple[float, float]:
        """Seconds of the forward per patch, and per squared patches of an image.

        Args:
            product_speed, attention_speed: operations per second. Windows count as full.
        """
        per_patch = 2 * (self.depth * self._block + self.patch_numbers * self.width)
        per_patch += 2 * self.num_levels * self._merger // self.merge**2
        in_windows = 4 * self.width * (self.depth - self.full_blocks) * self.window_patches
        per_patch_sq = 4 * self.width * self.full_blocks / attention_speed
        return per_patch / product_speed + in_windows / attention_speed, per_patch_sq

    def kept_bytes(self, patches: int, *, recompute: bool) -> int:
        """Of activations between forward and backward, for patches of one rank.

        Of a block without recomputation: two norms, queries, keys, values, their outcome, its
        projection, and the MLP before and after its activation.
        """
        mlp = (3 if self.is_gated else 2) * self.mlp_width
        block = 7 * self.width + mlp
        kept = self.depth * self.width + block if recompute else self.depth * block
        return self.element_bytes * patches * kept

    def feature_bytes(self, tokens: int, num_levels: int, *, is_trained: bool) -> int:
        """Of the features that a rank's rows read, with their fp32 gradients.

        Args:
            num_levels: that the rank's layers read.
        """
        per_channel = self.element_bytes + (4 if is_trained else 0)
        return tokens * num_levels * self.out_width * per_channel
