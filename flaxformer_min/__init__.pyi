"""The public names, each once, and the modules that they are imported from on first use."""

from .config import (
    Config as Config,
)
from .config import (
    DataConfig as DataConfig,
)
from .config import (
    ModelConfig as ModelConfig,
)
from .config import (
    SearchConfig as SearchConfig,
)
from .config import (
    TrainingConfig as TrainingConfig,
)
from .data.batches import shard_batch as shard_batch
from .decoding.search import Hypotheses as Hypotheses
from .decoding.search import search as search
from .decoding.translator import Translator as Translator
from .experiment.run import TrainResult as TrainResult
from .experiment.run import train as train
from .interop import export as export
from .interop import import_model as import_model
from .model.attention import (
    attention_weights as attention_weights,
)
from .model.attention import (
    scaled_dot_product_attention as scaled_dot_product_attention,
)
from .model.decoder import Decoder as Decoder
from .model.decoder import DecoderLayer as DecoderLayer
from .model.encoder import Encoder as Encoder
from .model.encoder import EncoderLayer as EncoderLayer
from .model.feed_forward import FeedForward as FeedForward
from .model.masks import (
    look_ahead_mask as look_ahead_mask,
)
from .model.masks import (
    padding_mask as padding_mask,
)
from .model.masks import (
    segment_mask as segment_mask,
)
from .model.multi_head_attention import MultiHeadAttention as MultiHeadAttention
from .model.positions import sinusoidal_encoding as sinusoidal_encoding
from .model.transformer import Transformer as Transformer
from .storage.run_folder import RunFolder as RunFolder
from .tokens import (
    Batch as Batch,
)
from .tokens import (
    Tokens as Tokens,
)
from .tokens import (
    one_sentence_per_row as one_sentence_per_row,
)
from .tokens import (
    shift_right as shift_right,
)
from .training.loss import cross_entropy as cross_entropy
from .training.step import (
    TrainState as TrainState,
)
from .training.step import (
    init_state as init_state,
)
from .training.step import (
    make_eval_step as make_eval_step,
)
from .training.step import (
    make_train_step as make_train_step,
)
