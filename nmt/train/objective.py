"""The model with its loss as one module, which is what gets compiled or sharded."""

from torch import Tensor, nn

from nmt.config import TrainingConfig
from nmt.data.batch import Batch
from nmt.model.transformer import Transformer
from nmt.train.loss import compute_loss_sums
from nmt.train.rdrop import compute_rdrop_sums


class Objective(nn.Module):
    """A batch -> the label-smoothed loss and the plain NLL, summed over its tokens.

    With `alpha`, that of R-Drop (`rdrop.py`), they are those of two passes.
    """

    def __init__(self, model: Transformer, smoothing: float, alpha: float | None = None) -> None:
        super().__init__()
        self.model, self.smoothing, self.alpha = model, smoothing, alpha

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        weight, labels = self.model.projection.weight, batch.labels
        hidden = self.model(batch.src, batch.tgt)
        if self.alpha is None:
            return compute_loss_sums(hidden, weight, labels, self.smoothing)
        again = self.model(batch.src, batch.tgt)  # with other dropout masks
        return compute_rdrop_sums(hidden, again, weight, labels, self.smoothing, self.alpha)


def make_objective(model: Transformer, training: TrainingConfig) -> Objective:
    return Objective(model, training.label_smoothing, training.rdrop)
