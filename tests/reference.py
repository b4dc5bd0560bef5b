"""The paper's formulas as loops over single numbers in float64: slow, and easy to check.

The library uses matrices, `vmap` and masks made of columns; this file shares none of it.
One head, one sentence or one row at a time; `mask[i][j]` is whether i may attend to j.
"""

import functools
import math
from types import SimpleNamespace

import jax
import numpy as np

from flaxformer_min.model.transformer import Transformer
from flaxformer_min.tokens import Batch, Tokens

BOS = 2


def attention_weights(query, key, mask):
    """Equation 1 without V: softmax(q · k / √d_k) over the keys that may be attended to."""
    weights = np.zeros((len(query), len(key)))
    for i in range(len(query)):
        allowed = [j for j in range(len(key)) if mask[i][j]]
        scores = {}
        for j in allowed:
            product = sum(float(q) * float(k) for q, k in zip(query[i], key[j], strict=True))
            scores[j] = product / math.sqrt(len(query[i]))
        highest = max(scores.values(), default=0.0)
        total = sum(math.exp(scores[j] - highest) for j in allowed)
        for j in allowed:
            weights[i, j] = math.exp(scores[j] - highest) / total
    return weights


def attention(query, key, value, mask):
    """Equation 1: softmax(Q Kᵀ / √d_k) V."""
    weights = attention_weights(query, key, mask)
    output = np.zeros((len(query), len(value[0])))
    for i in range(len(query)):
        for j in range(len(key)):
            for d in range(len(value[0])):
                output[i, d] += weights[i, j] * value[j][d]
    return output


def linear(x, kernel, bias):
    """X W + b at every position."""
    output = np.zeros((len(x), len(kernel[0])))
    for position in range(len(x)):
        for o in range(len(kernel[0])):
            output[position, o] = bias[o] + sum(
                x[position][i] * kernel[i][o] for i in range(len(kernel))
            )
    return output


def multi_head_attention(x, attended, mask, p, num_heads):
    """Section 3.2.2: Concat(head_1, ..., head_h) W^O; W_i is the i-th stripe of columns of W."""
    d_k = len(x[0]) // num_heads
    heads, weights = [], []
    for head in range(num_heads):
        stripe = slice(head * d_k, (head + 1) * d_k)
        q, k, v = (
            linear(seen, p[name]["kernel"][:, stripe], p[name]["bias"][stripe])
            for name, seen in [("query", x), ("key", attended), ("value", attended)]
        )
        heads.append(attention(q, k, v, mask))
        weights.append(attention_weights(q, k, mask))
    concatenated = [[number for head in heads for number in head[i]] for i in range(len(x))]
    return linear(concatenated, p["output"]["kernel"], p["output"]["bias"]), np.array(weights)


def feed_forward(x, p):
    """Equation 2: max(0, x W_1 + b_1) W_2 + b_2."""
    inner = linear(x, p["inner"]["kernel"], p["inner"]["bias"])
    for position in range(len(inner)):
        for i in range(len(inner[position])):
            inner[position, i] = max(0.0, inner[position, i])
    return linear(inner, p["outer"]["kernel"], p["outer"]["bias"])


def layer_norm(x, p, epsilon=1e-6):
    """Ba et al. 2016: (x - mean) / √(variance + ε), times a gain, plus a bias."""
    output = np.zeros(np.shape(x))
    for position, numbers in enumerate(x):
        mean = sum(numbers) / len(numbers)
        variance = sum((number - mean) ** 2 for number in numbers) / len(numbers)
        for i, number in enumerate(numbers):
            normed = (number - mean) / math.sqrt(variance + epsilon)
            output[position, i] = normed * p["scale"][i] + p["bias"][i]
    return output


def sinusoidal_encoding(positions, d_model, layout="interleaved"):
    """Section 3.5: PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = cos(...)."""
    encoding = np.zeros((len(positions), d_model))
    for row, position in enumerate(positions):
        for i in range(d_model // 2):
            angle = int(position) / 10000 ** (2 * i / d_model)
            sine, cosine = (2 * i, 2 * i + 1)
            if layout == "halves":
                sine, cosine = i, d_model // 2 + i
            encoding[row, sine], encoding[row, cosine] = math.sin(angle), math.cos(angle)
    return encoding


def embed(ids, positions, params, config):
    """Sections 3.4 and 3.5: √d_model times the token's row of the table, plus its position.

    The position's vector is a row of a second table if the encoding is learned (table 3, row E).
    """
    x = np.zeros((len(ids), config.d_model))
    for row, (token, position) in enumerate(zip(ids, positions, strict=True)):
        for i in range(config.d_model):
            x[row, i] = math.sqrt(config.d_model) * params["table"][token][i]
            if config.positional_encoding == "learned":
                x[row, i] += params["positional_encoding"]["table"][position][i]
    if config.positional_encoding == "learned":
        return x
    return x + sinusoidal_encoding(positions, config.d_model, config.positional_encoding)


def add_and_norm(x, sub_layer, p, norm):
    """Section 5.4: LayerNorm(x + Sublayer(x)); pre-norm is x + Sublayer(LayerNorm(x))."""
    if norm == "post":
        return layer_norm(x + sub_layer(x), p["norm"])
    return x + sub_layer(layer_norm(x, p["norm"]))


def same_sentence(query_segments, key_segments):
    """Which queries may attend to which keys of a packed row: their own sentence, not padding."""
    return [[q == k and k != 0 for k in key_segments] for q in query_segments]


def transformer(p, config, source, target, encoder_reach=None):
    """All of figure 1 for one row; returns the output of every layer, and the logits.

    `encoder_reach` limits the encoder's self-attention to so many tokens on either side.
    """
    seen = {}

    def attend(name, attended, mask, params):
        def sub_layer(x):
            keys = x if attended is None else attended
            output, weights = multi_head_attention(x, keys, mask, params, config.num_heads)
            seen[f"{name}/weights"] = weights
            return output

        return sub_layer

    def stack(side, x, self_mask, encoded=None, cross_mask=None):
        for number in range(config.num_layers):
            name, q = f"{side}/layer_{number}", p[side][f"layer_{number}"]
            sub_layer = attend(f"{name}/self_attention", None, self_mask, q["self_attention"])
            x = add_and_norm(x, sub_layer, q["self_attention_norm"], config.norm)
            if encoded is not None:
                sub_layer = attend(
                    f"{name}/cross_attention", encoded, cross_mask, q["cross_attention"]
                )
                x = add_and_norm(x, sub_layer, q["cross_attention_norm"], config.norm)
            sub_layer = functools.partial(feed_forward, p=q["feed_forward"])
            x = add_and_norm(x, sub_layer, q["feed_forward_norm"], config.norm)
            seen[name] = x
        return layer_norm(x, p[side]["final_norm"]) if "final_norm" in p[side] else x

    source_embedding = p.get("embedding", p.get("source_embedding"))
    target_embedding = p.get("embedding", p.get("target_embedding"))

    read = [
        BOS if position == 0 else target.ids[number - 1]
        for number, position in enumerate(target.positions)
    ]
    encoder_mask = same_sentence(source.segments, source.segments)
    if encoder_reach is not None:
        for i in range(len(encoder_mask)):
            for j in range(len(encoder_mask)):
                encoder_mask[i][j] = encoder_mask[i][j] and abs(i - j) <= encoder_reach
    decoder_mask = same_sentence(target.segments, target.segments)
    for i, now in enumerate(target.positions):
        for j, then in enumerate(target.positions):
            decoder_mask[i][j] = decoder_mask[i][j] and then <= now
    cross_mask = same_sentence(target.segments, source.segments)

    x = embed(source.ids, source.positions, source_embedding, config)
    encoded = stack("encoder", x, encoder_mask)
    x = embed(read, target.positions, target_embedding, config)
    decoded = stack("decoder", x, decoder_mask, encoded, cross_mask)
    kernel, bias = target_embedding["table"].T, np.zeros(config.vocab_size)
    if "output_projection" in p:
        kernel, bias = p["output_projection"]["kernel"], p["output_projection"]["bias"]
    seen["encoder"], seen["logits"] = encoded, linear(decoded, kernel, bias)
    return seen


def random_params(model, *arguments, seed=0):
    """Random parameters unlike the initial ones: biases are not 0, and gains are not 1."""
    numbers = np.random.default_rng(seed)
    shapes = jax.eval_shape(model.init, jax.random.key(0), *arguments)

    def fill(path, leaf):
        scale = 0.3 if leaf.ndim == 1 else leaf.shape[-1 if "table" in str(path) else 0] ** -0.5
        centre = 1.0 if "scale" in str(path) else 0.0
        return jax.numpy.asarray(numbers.normal(centre, scale, leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, shapes)


def two_rows():
    """A row of two packed sentences and a row of one, both with padding; ids are below 11."""
    rows = (
        ([[5, 6, 4, 3, 7, 3, 0], [9, 10, 4, 8, 3, 0, 0]], ((4, 2), (5,))),
        ([[8, 9, 3, 4, 10, 3], [5, 3, 0, 0, 0, 0]], ((3, 3), (2,))),
    )
    return Batch(*(_pack(ids, lengths) for ids, lengths in rows))


def _pack(ids, lengths):
    positions, segments = np.zeros_like(ids), np.zeros_like(ids)
    for row, sentences in enumerate(lengths):
        start = 0
        for number, length in enumerate(sentences, start=1):
            positions[row, start : start + length] = range(length)
            segments[row, start : start + length] = number
            start += length
    columns = (np.array(ids), positions, segments)
    return Tokens(*(jax.numpy.asarray(column, jax.numpy.int32) for column in columns))


def tiny(config, seed=0):
    """A model of `config`, random parameters, two rows to read, and the jitted forward pass."""
    model = Transformer(config)
    batch = two_rows()
    params = random_params(model, batch, seed=seed)
    return SimpleNamespace(
        model=model, config=config, params=params, batch=batch, forward=jax.jit(model.apply)
    )


class MethodOf:
    """A module seen through one of its methods, for `random_params`."""

    def __init__(self, module, method):
        self.init = lambda *arguments: module.init(*arguments, method=method)
