"""torch.nn.Transformer with our weights is the same model: a second opinion on every layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from flaxformer_min.config import ModelConfig
from flaxformer_min.tokens import Batch, one_sentence_per_row

torch = pytest.importorskip("torch")

SIZES = {"vocab_size": 11, "num_layers": 2, "d_model": 16, "d_ff": 24, "num_heads": 4}


def set_linear(module, *params):
    """Several layers become one, as torch has query, key and value: [out in]."""
    weight, bias = (
        (module.in_proj_weight, module.in_proj_bias)
        if hasattr(module, "in_proj_weight")
        else (module.weight, module.bias)
    )
    weight.copy_(torch.tensor(np.concatenate([each["kernel"].T for each in params])))
    bias.copy_(torch.tensor(np.concatenate([each["bias"] for each in params])))


def set_norm(module, params):
    module.weight.copy_(torch.tensor(params["scale"]))
    module.bias.copy_(torch.tensor(params["bias"]))


def set_attention(module, params):
    set_linear(module, params["query"], params["key"], params["value"])
    set_linear(module.out_proj, params["output"])


def with_our_weights(params, config):
    """A torch.nn.Transformer in float64. A post-norm stack of ours has no norm behind it."""
    model = torch.nn.Transformer(
        config.d_model,
        config.num_heads,
        config.num_layers,
        config.num_layers,
        config.d_ff,
        dropout=0.0,
        layer_norm_eps=config.norm_epsilon,
        batch_first=True,
        norm_first=config.norm == "pre",
        dtype=torch.float64,
    )
    with torch.no_grad():
        for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
            for number, layer in enumerate(stack.layers):
                own = params[side][f"layer_{number}"]
                set_attention(layer.self_attn, own["self_attention"])
                set_norm(layer.norm1, own["self_attention_norm"]["norm"])
                if side == "decoder":
                    set_attention(layer.multihead_attn, own["cross_attention"])
                    set_norm(layer.norm2, own["cross_attention_norm"]["norm"])
                set_linear(layer.linear1, own["feed_forward"]["inner"])
                set_linear(layer.linear2, own["feed_forward"]["outer"])
                last = layer.norm3 if side == "decoder" else layer.norm2
                set_norm(last, own["feed_forward_norm"]["norm"])
            if config.norm == "pre":
                set_norm(stack.norm, params[side]["final_norm"])
            else:
                stack.norm = None
    return model.train()  # its shortcut for evaluation is a prototype, which warns


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_torch_gives_our_logits_with_our_weights(norm):
    """In float64 against our float32, for a padded batch; its masks are True where ours are not."""
    tiny = reference.tiny(ModelConfig(**SIZES, norm=norm))
    tokens = one_sentence_per_row(jnp.array([[5, 6, 4, 3, 0], [8, 9, 3, 0, 0]]))
    batch = Batch(tokens, tokens)
    params = jax.tree.map(np.float64, tiny.params["params"])
    table = params["embedding"]["table"]
    positions = reference.sinusoidal_encoding(range(5), 16)
    source, target = (np.array(side.ids) for side in batch)
    read = np.concatenate([np.full((2, 1), 2), target[:, :-1]], axis=1)
    padded = torch.tensor(source == 0)
    embed = [torch.tensor(table[ids] * 4 + positions) for ids in (source, read)]
    causal = torch.triu(torch.ones(5, 5, dtype=torch.bool), diagonal=1)
    padding = {"src_key_padding_mask": padded, "memory_key_padding_mask": padded}
    model = with_our_weights(params, tiny.config)
    with torch.no_grad():
        hidden = model(*embed, tgt_mask=causal, **padding)
    theirs = hidden.numpy() @ table.T
    ours = tiny.forward(tiny.params, batch)
    real = target > 0
    difference = np.abs(np.asarray(ours)[real] - theirs[real]).max()
    print("largest difference of logits:", difference)
    assert difference < 2e-5
