"""The tokenizer: text to token ids and back, exactly as the model's reference library does it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

from labkit.tokenizer import batch, chat, ends
from labkit.tokenizer.added import AddedTokens
from labkit.tokenizer.codec import TokenBytes, as_ids
from labkit.tokenizer.pretokenize import Splitter
from labkit.tokenizer.stream import StreamDecoder
from labkit.tokenizer.words import UNENCODABLE_POLICIES, ByteWords, WordEncoder, surrogate_error

if TYPE_CHECKING:
    from pathlib import Path

    import torch


class Codec(Protocol):
    """How ids become text (see :mod:`labkit.tokenizer.codec`)."""

    @property
    def token_bytes(self) -> TokenBytes: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...

    def stream(self, skip_special_tokens: bool, continues: bool) -> StreamDecoder: ...


class Tokenizer:
    """Encodes text in four steps: added tokens are cut out, text is normalized, split into words, and merged.

    Build one with :meth:`from_gguf`, :meth:`from_file` or :meth:`from_tiktoken`. The ids equal the reference's
    (``tokenizers``' ``encode(text, add_special_tokens=False)``, `tiktoken`'s ``encode(text, allowed_special="all")``).

    Some vocabularies lack tokens for some bytes (SmolLM2's for 21 of the 256): see :attr:`unencodable_bytes` and
    :attr:`on_unencodable`.
    """

    def __init__(
        self,
        *,
        kind: str,
        words: WordEncoder,
        pretokenize: Splitter,
        added: AddedTokens,
        codec: Codec,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        chat_template: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
        prefix_ids: Sequence[int] = (),
        suffix_ids: Sequence[int] = (),
        chat_prefix_ids: Sequence[int] = (),
        vocab_size: int | None = None,
    ) -> None:
        self.kind = kind  # "byte-level BPE" or "SentencePiece BPE"
        self.bos_id = bos_id
        self.eos_ids = frozenset(eos_ids)
        self.chat_template = chat_template
        self.added_tokens = added.tokens  # every AddedToken, special or not
        self.special_tokens: dict[str, int] = {token.content: token.id for token in added.tokens if token.special}
        self._special_text = {i: content for content, i in self.special_tokens.items()}
        self.vocab_size = vocab_size if vocab_size is not None else 1 + max(words.vocab.values(), default=-1)
        self.pretokenize = pretokenize
        self._words = words
        self._added = added
        self._codec = codec
        self._template_variables = dict(template_variables or {})
        self._prefix_ids, self._suffix_ids = list(prefix_ids), list(suffix_ids)
        self._chat_prefix_ids = list(chat_prefix_ids)  # in front of a chat whose template does not write them
        self._knows_turn_end = False
        self.n_rows: int | None = None  # of the model's embedding, once there is a model
        self._native: Any = None  # the compiled encoder's tables, made when a long text or a batch first needs them
        self._batched: Any = None  # the same for tensors on a device

    # ---- text to ids ----------------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = False, parse_special: bool = True) -> list[int]:
        """The token ids of a text.

        With `add_special_tokens` the ids that the model's file prescribes around a text are added (Llama's BOS; SmolLM2
        has none). Special tokens written in the text ("<|im_end|>") become their ids, as in the reference libraries;
        ``parse_special=False`` treats them as plain characters - the right choice for text that a stranger wrote.

        Raises TypeError for anything but a str, ValueError for lone surrogates, and - under ``on_unencodable =
        "error"`` - for characters that have no token.
        """
        if not isinstance(text, str):
            raise TypeError(
                f"encode() takes one str, not {type(text).__name__}; for a list of texts use encode_batch()"
            )
        words, lookup = self._words, self._words.__getitem__
        ids = list(self._prefix_ids) if add_special_tokens else []
        try:
            at_start = True
            for piece in self._added.split(text, parse_special):
                if isinstance(piece, int):
                    ids.append(piece)
                elif len(piece) > batch.LONG_CHARS:
                    ids += batch.encode_long(self, piece, at_start)
                else:
                    ids += chain.from_iterable(map(lookup, self.pretokenize(piece, at_start)))
                at_start = False
        except UnicodeEncodeError as error:
            raise surrogate_error(text) from error
        except KeyError as error:
            raise ValueError(
                f"a merge of this tokenizer makes {error.args[0]!r}, which its vocabulary lacks"
            ) from error
        if words.lost:
            words.report()
        return ids + self._suffix_ids if add_special_tokens else ids

    def encode_prompt(self, text: str, *, chat: bool = False) -> list[int]:
        """The ids that a model is given for a text: with what its file prescribes around it (Llama's BOS).

        With `chat` the text comes out of the chat template, which writes its own special tokens: nothing is added,
        unless the file's own reference adds it (llama.cpp puts a GGUF's BOS in front of a template without one).
        Raises ValueError as :meth:`encode` does, and for an id that has no row in the model (see :meth:`fit`).
        """
        ids = self.encode(text, add_special_tokens=not chat)
        n = len(self._chat_prefix_ids)
        if chat and n and ids[:n] != self._chat_prefix_ids:
            ids = self._chat_prefix_ids + ids
        if self.n_rows is not None and max(ids, default=0) >= self.n_rows:
            i = max(ids)
            raise ValueError(
                f"the token {self._special_text.get(i) or self.decode([i])!r} has the id {i}, but the model has rows "
                f"for {self.n_rows} ids only: its tokenizer knows a token that it was not trained with. "
                "Take it out of the prompt."
            )
        return ids

    def fit(self, n_rows: int) -> None:
        """Learn how many rows the model's embedding has.

        More rows than tokens are padding: an id there decodes to nothing. Raises ValueError when a word of the
        vocabulary has no row; an added token without one (Gemma 3's image token) is refused where it is used.
        """
        words = self._words.vocab
        if beyond := [word for word, i in words.items() if not 0 <= i < n_rows and word not in self._added.contents]:
            raise ValueError(
                f"the tokenizer and the weights belong to different models: {len(beyond)} of {len(words)} tokens, "
                f"{beyond[0]!r} (id {words[beyond[0]]}) for one, have no row among the embedding's {n_rows}."
            )
        self.n_rows = self._codec.token_bytes.n_rows = n_rows

    def encode_batch(self, texts: Sequence[str], device: str | torch.device | None = None) -> list[Any]:
        """The ids of many texts at once, each as :meth:`encode` gives it.

        ``device=None`` returns a list of lists, by the fastest way this machine has. With a device ("cpu", "cuda") the
        splitting and merging run there as batched tensor operations, and each text's ids come back as an int32 tensor
        on that device (views of one buffer).
        """
        if isinstance(texts, str):
            raise TypeError("encode_batch() takes a list of texts; for a single str use encode()")
        if device is None:
            return batch.encode_lists(self, texts)
        from labkit.tokenizer.batched import encode_tensors

        return encode_tensors(self, texts, device)

    def warm_up(self) -> str | None:
        """Wait until the compiled encoder for long texts and batches is ready (seconds, once for a machine).

        Nothing needs this: until then the Python path answers. Returns None, or why there is no compiled encoder.
        """
        return batch.warm_up(self)

    # ---- ids to text ----------------------------------------------------------------------------------------------

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of a sequence of ids (a list, a tensor, an array). Bytes that are not UTF-8 become U+FFFD.

        Raises ValueError for an id outside the vocabulary.
        """
        return self._codec.decode(as_ids(ids), skip_special_tokens)

    def stream(self, skip_special_tokens: bool = True, *, continues: bool = False) -> StreamDecoder:
        """A decoder for ids that arrive one at a time: ``.push(id)`` and, at the end, ``.flush()`` give whole
        characters. With `continues` the ids go on from an earlier text, whose last word a space may follow."""
        return self._codec.stream(skip_special_tokens, continues)

    def hidden_text(self, token_id: int) -> str:
        """The text of a special token, which a stream leaves out; "" for any other."""
        return self._special_text.get(token_id, "")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; ValueError for an id outside the vocabulary."""
        return self._codec.token_bytes[token_id]

    # ---- chat -----------------------------------------------------------------------------------------------------

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text for a conversation, by the model's own template (run in Jinja's sandbox).

        `messages` is a list of ``{"role": ..., "content": ...}``; with `add_generation_prompt` the text ends where the
        assistant is to speak. Raises ValueError when the model has no template or it does not accept the messages.
        """
        if self.chat_template is None:
            raise ValueError(
                "this model's files carry no chat template, so it was not trained to chat: "
                "give it plain text (chat=False) or load an instruct model"
            )
        if not self._knows_turn_end and add_generation_prompt:
            self._knows_turn_end = True
            end = ends.in_template(self._laid_out, self.encode, frozenset(self._special_text))
            self.eos_ids |= frozenset(() if end is None else (end,))
        return self._laid_out(messages, add_generation_prompt=add_generation_prompt, **variables)

    def _laid_out(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        known = {"add_generation_prompt": False, "tools": None, "documents": None} | self._template_variables
        return chat.render(self.chat_template or "", messages, **(known | variables))

    def prepare_chat(self) -> None:
        """Have ready what the first chat needs (Jinja, a process for templates). A broken template is that chat's
        error: nothing of a stranger's is run here."""
        if self.chat_template is not None:
            with suppress(ValueError):
                chat.prepare(self.chat_template)

    # ---- what the vocabulary cannot say ----------------------------------------------------------------------------

    @property
    def unencodable_bytes(self) -> bytes:
        """The bytes for which this vocabulary has no token; empty for most models."""
        from labkit.tokenizer.byte_level import BYTE_OF

        missing = self._words.missing if isinstance(self._words, ByteWords) else ()
        return bytes(sorted(BYTE_OF[symbol] for symbol in missing))

    @property
    def on_unencodable(self) -> str:
        """What happens to a character that needs such a byte.

        ``"warn"`` (default): those bytes are left out, as the reference does, and an UnencodableWarning names the
        character. ``"drop"``: left out without a word. ``"replace"``: U+FFFD is encoded in the character's place.
        ``"error"``: ValueError.
        """
        return self._words.on_unencodable

    @on_unencodable.setter
    def on_unencodable(self, policy: str) -> None:
        if policy not in UNENCODABLE_POLICIES:
            raise ValueError(f"on_unencodable must be one of {', '.join(UNENCODABLE_POLICIES)}, not {policy!r}")
        self._words.on_unencodable = policy

    def __repr__(self) -> str:
        return f"Tokenizer({self.kind}, {self.vocab_size} tokens, {len(self.special_tokens)} special)"

    # ---- loading --------------------------------------------------------------------------------------------------

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From a GGUF file's key-value pairs (plain Python values); an unknown pre-tokenizer name is refused."""
        from labkit.tokenizer.gguf_file import load

        return load(metadata)

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """From a ``tokenizer.json``, or a folder with one; the chat template and end-of-text ids come from beside
        it."""
        from labkit.tokenizer.json_file import load

        return load(path)

    @classmethod
    def from_tiktoken(cls, path: str | Path, *, pattern: str, **options: Any) -> Tokenizer:
        """From a tiktoken rank file.

        `pattern` is an encoding's name ("cl100k_base", "o200k_base", "gpt2", "llama3") or a regular expression.
        Options: `special_tokens` (name -> id), `eos_token` (one of these names), `chat_template`.
        """
        from labkit.tokenizer.tiktoken_file import load

        return load(path, pattern=pattern, **options)
