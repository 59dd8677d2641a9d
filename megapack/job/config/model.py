"""The config's section `model`: the options of `cost.options`, read from a folder and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from megapack.cost.assumed import GpuSpeed, with_image_costs
from megapack.cost.model import CostModel
from megapack.cost.sizes import ModelSizes
from megapack.cost.tower import TowerSizes
from megapack.errors import ConfigError
from megapack.job.config.architecture import check_architecture
from megapack.job.config.hf_config import HfConfig, read_hf_config
from megapack.job.config.hf_tensors import TOWER
from megapack.layout import Fp8, Layout, fp8_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelSizes):
    """A GPT as Megatron-Core builds it. The defaults are a toy that trains on a laptop."""

    SECTION: ClassVar[str] = "model."

    def __post_init__(self) -> None:
        folder = None if self.hf_path is None else read_hf_config(self.hf_path)
        if folder is not None:
            # Not the keys that a file leaves out: `resolve` has taken those from the folder.
            _check_folder(folder, vars(self))
        self._check_vision(folder)
        try:
            super().__post_init__()
            check_architecture(self)
        except ConfigError as error:
            if self.hf_path is None:
                raise
            raise ConfigError(f"with the sizes of {self.hf_path}: {error}") from None

    @classmethod
    def from_hf(cls, folder: str, **keys: Any) -> ModelConfig:
        """The config of a Hugging Face folder's model.

        Args:
            folder: see `hf_path`.
            keys: other keys, such as dtype="bf16"; the default is fp32.

        Raises:
            ConfigError: see `read_hf_config`; or a key contradicts the folder.
        """
        return cls(**cls.resolve({"hf_path": folder, **keys}))

    @classmethod
    def resolve(
        cls, keys: Mapping[str, Any], where: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """The keys with those of the folder `hf_path`, if that is set.

        `config.typed.Converter` calls it with the keys of a file, before defaults are filled in.

        Args:
            where: the position of a key in its file, for errors.

        Raises:
            ConfigError: as `from_hf`.
        """
        folder = keys.get("hf_path")
        if folder is None:
            return dict(keys)
        try:
            found = read_hf_config(folder)
        except ConfigError as error:
            raise ConfigError(f"{_position('hf_path', where)}{error}") from None
        _check_folder(found, keys, where)
        return {**found.values_with_mtp(keys.get("mtp_num_layers")), **keys}

    def with_value_head(self) -> ModelConfig:
        """The same model with a value head in place of its output layer.

        The head must not be the embedding, so a tied model is untied. It is not the model of its
        Hugging Face folder any more, and has no tower.
        """
        return dataclasses.replace(
            self,
            hf_path=None,
            untie_embeddings=True,
            vision="off",
            freeze=self.freeze_of(tower=False),
        )

    def freeze_of(self, *, tower: bool) -> tuple[str, ...]:
        """The globs of `freeze` that are of the tower, or of the decoder."""
        return tuple(glob for glob in self.freeze if glob.startswith(TOWER) is tower)

    @property
    def tower_sizes(self) -> TowerSizes | None:
        """The sizes of the folder's tower; None if images are not trained."""
        if self.vision == "off" or self.hf_path is None:
            return None
        tower = read_hf_config(self.hf_path).vision
        if tower is None:
            return None
        return dataclasses.replace(tower.sizes, element_bytes=4 if self.dtype == "fp32" else 2)

    def with_image_costs(
        self, cost: CostModel, layout: Layout, speed: GpuSpeed, recompute: str
    ) -> CostModel:
        """The cost model with seconds of images, if images are trained."""
        tower = self.tower_sizes
        if tower is None:
            return cost
        trained, again = self.vision == "train", recompute == "full"
        return with_image_costs(cost, tower, layout, speed, trained=trained, recompute=again)

    def check_same_sizes(self, folder: str) -> None:
        """Raise ConfigError if a Hugging Face folder's model has another architecture."""
        _check_folder(read_hf_config(folder), vars(self))

    def _check_vision(self, folder: HfConfig | None) -> None:
        globs = self.freeze_of(tower=True)
        if globs and self.vision != "train":
            raise ConfigError(
                f"model.freeze has {globs[0]!r}, but with model.vision={self.vision} no tower is "
                "trained; leave it out, or set model.vision=train"
            )
        if self.vision == "off":
            return
        reasons = {
            "needs the tower of a Hugging Face folder; set model.hf_path": folder is None,
            f"with model.mtp_num_layers={self.mtp_num_layers}, which would embed image tokens as "
            "text; set model.mtp_num_layers=0": self.mtp_num_layers,
            f"with model.fp8={self.fp8}, which megapack does not train with images; set "
            "model.fp8=null": self.fp8 is not None,
        }
        if folder is not None and folder.vision is None:
            is_gemma = folder.model_type in ("gemma3", "gemma4")
            why = "image tokens of Gemma attend in both directions" if is_gemma else "has no tower"
            reasons[f"but {folder.file}: {why}; set model.vision=off"] = True
        for reason, holds in reasons.items():
            if holds:
                raise ConfigError(f"model.vision={self.vision} {reason}")

    @property
    def fp8_rows(self) -> Fp8:
        """The value of `Layout.fp8` that aligns rows for the FP8 recipe."""
        return False if self.fp8 is None else fp8_rows(self.fp8)


def _check_folder(
    folder: HfConfig, keys: Mapping[str, Any], where: Mapping[str, str] | None = None
) -> None:
    """Raise ConfigError for the first key that contradicts a Hugging Face folder."""
    for name, found in folder.values_with_mtp(keys.get("mtp_num_layers")).items():
        if name in keys and keys[name] != found:
            raise ConfigError(
                f"{_position(name, where)}model.{name} is {keys[name]}, but {folder.file} gives "
                f"{found}; leave the key out (in Python: ModelConfig.from_hf)"
            )


def _position(key: str, where: Mapping[str, str] | None) -> str:
    return f"{where[key]}: " if where and key in where else ""
