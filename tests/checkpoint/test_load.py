"""load(): names, folders and files; what is wrong with them, in words; random shapes; where a model runs."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_files import write_folder, write_gguf

import labkit
from labkit.checkpoint import assemble, placement

IDS = [5, 77, 300, 12, 9]


def loaded(name, **options):
    return labkit.load(str(name), **{"device": "cpu", "dtype": "fp32", **options})


def edit_json(path, **changes):
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "model")


# --- what loads ------------------------------------------------------------------------------------------------------


def test_folder_gives_transformers_logits(folder):
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        wanted = reference(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(loaded(folder)(IDS), wanted, rtol=1e-4, atol=1e-5)


def test_shards_and_a_single_file_are_the_same_model(folder, tmp_path):
    whole = loaded(folder).transformer.state_dict()
    for other in (write_folder(tmp_path / "sharded", n_shards=3), folder / "model.safetensors"):
        state = loaded(other).transformer.state_dict()
        assert state.keys() == whole.keys()
        assert all(torch.equal(state[name], whole[name]) for name in whole)


def test_shards_without_an_index_are_found_too(tmp_path):
    sharded = write_folder(tmp_path / "sharded", n_shards=2)
    (sharded / "model.safetensors.index.json").unlink()
    assert loaded(sharded).config.n_layers == 2


def test_model_does_not_depend_on_its_files_once_loaded(folder):
    model = loaded(folder)
    before = model(IDS)
    (folder / "model.safetensors").write_bytes(b"")
    assert torch.equal(model(IDS), before)


def test_gguf_file_and_a_folder_that_holds_one(tmp_path):
    path = write_gguf(tmp_path / "model.gguf")
    model = loaded(path, weights="plain")
    assert model.nbytes == sum(t.numel() for t in model.transformer.state_dict().values()) * 4
    assert torch.equal(loaded(tmp_path, weights="plain")(IDS), model(IDS))
    assert model.tokenizer.decode(model.tokenizer.encode("Grüße 你好")) == "Grüße 你好"


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "float32"])
def test_dtype_is_what_was_asked_for(folder, dtype):
    model = loaded(folder, dtype=dtype)
    assert {t.dtype for t in model.transformer.state_dict().values()} == {model.dtype}
    assert str(model.dtype).endswith({"bf16": "bfloat16", "fp16": "float16"}.get(dtype, dtype))


def test_models_lists_names_that_resolve():
    names = labkit.models()
    assert names[0] == "smollm2-135m-instruct"
    assert "random:llama-2-7b" in names
    assert len(names) == len(set(names))


# --- what does not, and why ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2", "Did you mean 'smollm2"),
        ("llama-2-7b", "Did you mean 'random:llama-2-7b'"),
        ("random:lama-2-7b", "Did you mean 'random:llama-2-7b'"),
        ("", r"unknown model ''\. Choose a name \(smollm2-135m-instruct"),
        ("what is this", "Hugging Face id"),
        ("weights.bin", "is a pickle"),
    ],
)
def test_unknown_names_list_the_choices(name, message):
    with pytest.raises(ValueError, match=message):
        loaded(name)


def test_files_that_are_not_there(tmp_path):
    for name in (tmp_path / "absent.gguf", tmp_path / "absent.safetensors"):
        with pytest.raises(FileNotFoundError, match="there is no file"):
            loaded(name)
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        loaded(tmp_path)


def test_missing_unexpected_and_wrong_shaped_tensors_are_named(folder):
    def change(tensors):
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        tensors["model.layers.0.mlp.extra_proj.weight"] = torch.zeros(3)
        tensors["model.norm.weight"] = torch.ones(7)
        tensors["model.layers.0.input_layernorm.weight"] = torch.ones(256, dtype=torch.int32)

    edit_tensors(folder, change)
    with pytest.raises(ValueError, match="the config and the weights disagree") as error:
        loaded(folder)
    text = str(error.value)
    assert "1 missing: layers.1.attention.k_proj.weight" in text
    assert "1 unexpected: model.layers.0.mlp.extra_proj.weight" in text
    assert "final_norm.weight is (7,), should be (256,)" in text
    assert "layers.0.attention_norm.weight holds int32" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, "9 missing: layers.2"),
        ({"num_hidden_layers": 1}, "9 unexpected: model.layers.1"),
        ({"num_hidden_layers": 4000}, "4000 layers cannot be made of 20 tensors"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"tie_word_embeddings": False}, "1 missing: head.weight"),
        ({"hidden_size": 2**31 - 1, "head_dim": 64}, "sizes that no tensor can have|should be"),
        ({"num_attention_heads": 3}, "3 heads|evenly"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"hidden_act": "xielu"}, "activation 'xielu' is not supported"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "'mrope' is not supported: labkit knows linear"),
        ({"model_type": "mamba"}, "architecture 'mamba' is not supported. labkit runs .*gemma2.*llama"),
        ({"model_type": None}, "architecture None"),
        ({"quantization_config": {"quant_method": "gptq"}}, "packed weights"),
    ],
)
def test_config_that_does_not_fit(folder, changes, message):
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ValueError, match=message):
        loaded(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_named(folder, value):
    def change(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value

    edit_tensors(folder, change)
    with pytest.raises(ValueError, match=r"1 tensors hold NaN or infinity.*layers\.1\.ffn\.up_proj\.weight"):
        loaded(folder)


def test_values_beyond_fp16_are_explained(folder):
    def change(tensors):
        tensors["model.norm.weight"][0] = 1e6

    edit_tensors(folder, change)
    assert loaded(folder, dtype="bf16").config.n_layers == 2
    with pytest.raises(ValueError, match=r"final_norm\.weight.*do not fit in fp16: try dtype='bf16'"):
        loaded(folder, dtype="fp16")


def test_large_sums_of_finite_values_are_no_alarm():
    state = {"w": torch.full((8,), 3e38)}
    assemble._report_not_finite("m", state, {"w": state["w"].sum()}, torch.float32)


def test_pickled_weights_are_never_opened(folder):
    class Trap:
        def __reduce__(self):
            return pytest.fail, ("a pickle was opened",)

    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match="pickled weights only"):
        loaded(folder)


def test_missing_shard_and_an_index_that_leads_elsewhere(tmp_path):
    sharded = write_folder(tmp_path / "sharded", n_shards=3)
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks 1 of the 3 shards .*model-00002-of-00003\.safetensors"):
        loaded(sharded)
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../../elsewhere.safetensors"}}))
    with pytest.raises(ValueError, match="no usable weight_map"):
        loaded(sharded)


def test_missing_tokenizer_says_how_to_get_one(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json.*save_pretrained"):
        loaded(folder)


# --- where it runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "unknown device 'gpu': choose one of auto, cpu, cuda"),
        ({"device": "xla"}, "unknown device"),
        ({"dtype": "int3"}, "unknown dtype 'int3'"),
        ({"weights": "int3.5"}, "unknown weights 'int3.5': choose one of"),
        ({"backend": "warp"}, "unknown backend 'warp': choose one of"),
    ],
)
def test_unknown_switches_list_the_choices(folder, options, message):
    with pytest.raises(ValueError, match=message):
        loaded(folder, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_device_says_what_to_do():
    with pytest.raises(ValueError, match=r"sees 0 CUDA devices.*device='auto'"):
        labkit.load(device="cuda")
    assert placement.choose_device("auto") == torch.device("cpu")


@pytest.mark.parametrize(("capability", "wanted"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16)])
def test_auto_dtype_follows_the_gpu(monkeypatch, capability, wanted):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    assert placement.choose_dtype("auto", torch.device("cuda")) == wanted
    if capability < (8, 0):
        with pytest.raises(ValueError, match=r"Tesla T4 has no bf16.*dtype='fp16'"):
            placement.choose_dtype("bf16", torch.device("cuda"))


@pytest.mark.parametrize("native", [True, False])
def test_auto_dtype_follows_the_cpu(monkeypatch, native):
    monkeypatch.setattr(placement, "cpu_has_bf16", lambda: native)
    wanted = torch.bfloat16 if native else torch.float32
    assert placement.choose_dtype("auto", torch.device("cpu")) == wanted


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_same_logits(folder):
    on_gpu = loaded(folder, device="cuda")
    assert {t.device.type for t in on_gpu.transformer.state_dict().values()} == {"cuda"}
    torch.testing.assert_close(on_gpu(IDS).cpu(), loaded(folder)(IDS), rtol=1e-3, atol=1e-3)


# --- imports ---------------------------------------------------------------------------------------------------------


HEAVY = {"transformers", "plotly", "ipywidgets", "huggingface_hub", "torch._dynamo", "pandas", "rich", "numba"}


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("labkit.load, labkit.Pipeline", set()),
        ("labkit.load({path!r}, device='cpu', dtype='fp32', backend='reference')", set()),
        ("labkit.load({path!r}, device='cpu', dtype='fp32')", {"numba"}),  # in the background, while the file is read
    ],
)
def test_importing_labkit_and_loading_pulls_in_nothing_heavy(tmp_path, code, allowed):
    code = code.format(path=str(write_gguf(tmp_path / "model.gguf")))
    code = f"import sys, labkit; {code}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert HEAVY & set(done.stdout.split()) <= allowed
