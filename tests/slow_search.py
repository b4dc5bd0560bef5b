"""Search in plain Python, the reference for the fast one: no arrays, no bound, no cache.

`model(history)` lists the log-probability of every next token after the tokens of `history`, which
are those after the prefix. A hypothesis is (tokens, log_prob, score).
"""

from itertools import product

EOS = 3
WORDS = 4
NEVER = float("-inf")


def score(log_prob, length, alpha):
    return log_prob / ((5 + length) / 6) ** alpha


def every_sentence(model, max_length, alpha):
    """All sentences of at most `max_length` tokens with EOS, best first."""
    vocab, found = len(model(())), []
    for length in range(max_length):
        for words in product(range(WORDS, vocab), repeat=length):
            ids = (*words, EOS)
            log_prob = forced(model, ids)
            found.append((ids, log_prob, score(log_prob, length + 1, alpha)))
    return sorted(found, key=lambda hypothesis: -hypothesis[2])


def forced(model, ids):
    """Teacher forcing: the log-probability of these tokens."""
    return sum(model(ids[:position])[token] for position, token in enumerate(ids))


def beam(
    model,
    *,
    beam_size,
    n_best,
    alpha,
    max_length,
    min_length=0,
    prefix=(0, 0.0),
    enough=1e9,
    suppressed=(),
):
    """Beam search until `max_length` is reached, whatever was found.

    Once `enough` have ended, only those go on whose score is better than the worst that is kept.
    """
    prefix_length, prefix_log_prob = prefix
    alive, finished, count = [((), prefix_log_prob)], [], 0
    for length in range(prefix_length + 1, max_length + 1):
        ended, continued = [], []
        for tokens, log_prob in alive:
            for token, more in enumerate(model(tokens)):
                if token == EOS and (length - 1 >= min_length or length == max_length):
                    ended.append(((*tokens, EOS), log_prob + more))
                if token >= WORDS and token not in suppressed and length < max_length:
                    continued.append(((*tokens, token), log_prob + more))
        alive = sorted(continued, key=lambda hypothesis: -hypothesis[1])[:beam_size]
        worst = alive[-1][1] if len(alive) == beam_size else NEVER
        ended = [(*end, score(end[1], length, alpha)) for end in ended if end[1] >= worst]
        finished = sorted(finished + ended, key=lambda hypothesis: -hypothesis[2])[:n_best]
        count += len(ended)
        if count >= enough:
            least = finished[-1][2] if len(finished) == n_best else NEVER
            alive = [each for each in alive if score(each[1], length, alpha) > least]
    return finished


def greedy(model, *, max_length, min_length=0, suppressed=()):
    """The likeliest allowed token, until it is EOS: the tokens."""
    tokens = ()
    while EOS not in tokens:
        length = len(tokens) + 1
        log_probs = dict(enumerate(model(tokens)))
        may = range(WORDS if length <= min_length else EOS, len(log_probs))
        may = [token for token in may if token not in suppressed]
        tokens += (EOS if length == max_length else max(may, key=log_probs.get),)
    return tokens
