"""The recurrent encoder-decoders that came before the Transformer, for `train(model=...)`.

| file        | the paper's section 2 and its sources                                         |
|-------------|-------------------------------------------------------------------------------|
| `gru.py`    | the gated recurrent unit (Cho et al. 2014), one token after the other         |
| `global_attention.py` | attention over all source states (Luong et al. 2015)                |
| `models.py` | both encoder-decoders, with the methods that training and decoding call        |

They share the embedding, the output projection, dropout, the loss, the optimizer and the search
with the Transformer; what differs is how a token learns about the other tokens.
"""

from predecessors.models import AttentionalRNN, FixedVectorRNN

__all__ = ["AttentionalRNN", "FixedVectorRNN"]
