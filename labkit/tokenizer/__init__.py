"""The tokenizer room: text to token ids, exactly as each model's reference does it, and back.

* :class:`Tokenizer` - what a loaded model carries: encode, decode, stream, chat template, batches on the device.
* :mod:`~labkit.tokenizer.bpe` - the algorithm to learn from: training with the merges as data, encoding with a trace.
"""

from labkit.tokenizer.tokenizer import Tokenizer
from labkit.tokenizer.words import UnencodableWarning

__all__ = ["Tokenizer", "UnencodableWarning"]
