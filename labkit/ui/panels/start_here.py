"""Lesson 00, start here: the quiz."""

QUIZ = (
    (
        "You double the length of your prompt. Which figure grows for certain?",
        {
            "TTFT": "Yes. The prefill has twice the tokens to work through before the first one can come.",
            "Tokens per second": "No. Decode goes on one token at a time; it slows a little at most.",
            "The memory of the weights": "No. The weights are the same for every prompt; only the cache grows.",
        },
        "TTFT",
    ),
    (
        "Why is there a pause before the first word?",
        {
            "The model is still loading": "It was loaded before. The pause comes back with every prompt.",
            "The prompt goes through all layers first": "Yes: tokenize, prefill, then the first sample. That is TTFT.",
            "The first word is harder to find": "No. Every token costs such a step; the prompt is the difference.",
        },
        "The prompt goes through all layers first",
    ),
    (
        "What limits how fast a single answer can be written?",
        {
            "How fast the weights can be read from memory": "Yes: all of them, once for each token.",
            "The number of words in the vocabulary": "It sets the size of the lm head, one segment among several.",
        },
        "How fast the weights can be read from memory",
    ),
)
