"""The HTTP door, through the client that people use for it, against what the service itself says."""

from __future__ import annotations

import json
import socket
import threading
import time

import httpx
import openai
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from labkit import Sampling
from labkit.pipeline import Pipeline
from labkit.serving import Continuous, Service
from labkit.serving.http import build_app

KEY = "a-key"


@pytest.fixture(scope="module")
def service(model):
    model.tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    with Service(model, scheduler=Continuous(max_requests=2), backend="reference", max_waiting=3) as service:
        yield service
    model.tokenizer.chat_template = None


@pytest.fixture(scope="module")
def url(service):
    app = build_app(service, model_name="tiny", api_key=KEY, max_body_bytes=20_000)
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


def ask(client, **options):
    return client.completions.create(
        **{"model": "tiny", "prompt": "Hello", "max_tokens": 12, "temperature": 0} | options
    )


def until(condition, timeout_s=20.0) -> bool:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_a_completion_is_what_the_pipeline_says(client, model):
    done = ask(client, extra_body={"ignore_eos": True})
    want = Pipeline(model, backend="reference").generate("Hello", max_new_tokens=12, ignore_eos=True)
    assert (done.choices[0].text, done.choices[0].finish_reason) == (want.text, "length")
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (5, 12, 17)
    assert done.object == "text_completion"


def test_a_stream_joins_to_the_whole(client):
    whole = ask(client, extra_body={"ignore_eos": True}).choices[0].text
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "length"


def test_a_chat_goes_through_the_template(client, model):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    done = client.chat.completions.create(model="tiny", messages=messages, max_tokens=9, temperature=0)
    want = Pipeline(model, backend="reference").generate("[system]Be brief.[user]Hi[assistant]", max_new_tokens=9)
    assert done.choices[0].message.content == want.text
    stream = client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=9, temperature=0, stream=True
    )
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == want.text


def test_a_seed_reproduces_and_a_stop_string_ends_it(client, model):
    options = {"temperature": 1.0, "seed": 4, "extra_body": {"ignore_eos": True}}
    text = ask(client, **options).choices[0].text
    want = Pipeline(model, backend="reference", sampling=Sampling(temperature=1.0))
    assert text == want.generate("Hello", max_new_tokens=12, seed=4, ignore_eos=True).text
    stop = text[4:6]
    cut = ask(client, stop=[stop], **options).choices[0]
    assert (cut.text, cut.finish_reason) == (text[: text.find(stop)], "stop")


def test_log_probabilities(client, model):
    done = ask(client, logprobs=2, max_tokens=3).choices[0]
    ids = model.tokenizer.encode("Hello")
    assert len(done.logprobs.tokens) == 3
    first = model(ids)[-1].log_softmax(0)
    assert done.logprobs.token_logprobs[0] == pytest.approx(float(first.max()), abs=1e-4)
    messages = [{"role": "user", "content": "Hi"}]
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=2, logprobs=True, top_logprobs=3)
    entry = chat.choices[0].logprobs.content[0]
    assert len(entry.top_logprobs) == 3
    assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob


def test_several_prompts_in_one_request(client):
    done = ask(client, prompt=["Hello", "Good day"])
    assert [choice.index for choice in done.choices] == [0, 1]
    assert done.choices[0].text == ask(client).choices[0].text


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"n": 2}, openai.BadRequestError, "n=2 is not served here"),
        ({"temperature": -1}, openai.BadRequestError, "temperature=-1: must be 0 or more"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens=0: 1 or more"),
        ({"prompt": ""}, openai.BadRequestError, "the prompt is empty"),
        ({"prompt": "x" * 300}, openai.BadRequestError, "the prompt has 300 tokens"),
        ({"prompt": "x" * 30_000}, openai.APIStatusError, "longer than this server takes"),
        ({"model": "gpt-4"}, openai.NotFoundError, "'gpt-4' is not here: this server has 'tiny'"),
        ({"logprobs": 50}, openai.BadRequestError, "0 to 20 are served"),
    ],
)
def test_what_is_refused_says_why(client, options, error, message):
    with pytest.raises(error, match=message):
        ask(client, **options)


def test_the_key_is_asked_for(url):
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 401
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}


def test_a_web_page_elsewhere_cannot_post_here(url):
    body = json.dumps({"prompt": "Hello"})
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "text/plain"}
    assert httpx.post(f"{url}/v1/completions", content=body, headers=headers).status_code == 415
    broken = httpx.post(f"{url}/v1/completions", content="{", headers=headers | {"Content-Type": "application/json"})
    assert broken.json()["error"]["message"].startswith("the body is not JSON")


def test_the_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 200
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        client.models.retrieve("org/other")


def test_a_wrong_method_is_a_sentence_too(url):
    answer = httpx.get(f"{url}/v1/completions")
    assert answer.status_code == 405
    assert answer.json()["error"]["message"] == "/v1/completions is asked with POST, not GET."


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_blocks(url, service, monkeypatch, stream):
    step = service.engine.step
    monkeypatch.setattr(service.engine, "step", lambda *a, **k: (time.sleep(0.02), step(*a, **k))[1])
    body = {"prompt": "Hello", "max_tokens": 190, "temperature": 0, "stream": stream, "ignore_eos": True}
    n_before = len(service.requests)
    with httpx.Client(headers={"Authorization": f"Bearer {KEY}"}, timeout=0.4 if not stream else 20) as http:
        if stream:
            with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post(f"{url}/v1/completions", json=body)
    assert until(lambda: len(service.requests) > n_before)
    assert service.requests[-1].sequence.finish_reason == "cancelled"
    assert service.engine.cache.allocator.n_used == 0


def test_a_full_queue_is_refused_politely(url, service, monkeypatch):
    gate, step = threading.Event(), service.engine.step
    monkeypatch.setattr(service.engine, "step", lambda *a, **k: (gate.wait(30), step(*a, **k))[1])
    requests = [service.submit("Hello", max_new_tokens=2)]
    assert until(lambda: not service.n_waiting)
    requests += [service.submit("Hello", max_new_tokens=2) for _ in range(3)]
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "Hello"}, headers={"Authorization": f"Bearer {KEY}"})
    gate.set()
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert "requests are waiting" in answer.json()["error"]["message"]
    assert all(request.sequence.ended.wait(30) for request in requests)


def test_metrics_have_the_names_of_vllm(url, client, service):
    def read():
        families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
        return {sample.name: sample.value for family in families for sample in family.samples}

    before = read()
    ask(client, max_tokens=5, extra_body={"ignore_eos": True})
    after = read()

    def gained(name):
        return after[name] - before[name]

    assert gained("vllm:generation_tokens_total") == 5
    assert gained("vllm:prompt_tokens_total") == 5
    assert gained("vllm:time_to_first_token_seconds_count") == 1
    assert gained("vllm:inter_token_latency_seconds_count") == 4
    assert after["vllm:num_requests_running"] == after["vllm:kv_cache_usage_perc"] == 0
