"""What a transformer's activations take, and how many parameters it has (lesson 12)."""

from dataclasses import dataclass, fields

RECOMPUTE = "nothing", "attention", "layers"


@dataclass(frozen=True)
class Transformer:
    """A transformer like GPT, of `layers` layers that are `width` wide.

    length: of a sequence, in tokens; vocabulary: how many tokens there are.
    Raises ValueError for a number that is not a whole one from 1 on, and heads that do not divide
    the width.
    """

    layers: int
    width: int
    heads: int
    length: int = 2048
    vocabulary: int = 51200

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (isinstance(value, int) and value >= 1):
                raise ValueError(f"{field.name} must be a whole number from 1 on, not {value}")
        if self.width % self.heads:
            raise ValueError(f"a width of {self.width} cannot be shared by {self.heads} heads")

    @property
    def parameters(self) -> int:
        """Narayanan et al. (arXiv 2104.04473), equation 2. Output weights are the embedding's."""
        L, h = self.layers, self.width
        return L * (12 * h * h + 13 * h) + (self.vocabulary + self.length) * h

    def activations(
        self,
        batch: int,
        *,
        tensor_parallel: int = 1,
        sequence_parallel: bool = False,
        recompute: str = "nothing",
    ) -> float:
        """Bytes that the layers keep for backward, in 16 bits, of `batch` sequences. Lessons 6, 10.

        Korthikanti et al. (arXiv 2205.05198), Table 2. With s tokens, b sequences, a heads, h wide,
        and t ranks that share each layer by features:

        | | a layer |
        |---|---|
        | one rank | sbh (34 + 5as/h) |
        | tensor parallel | sbh (10 + 24/t + 5as/(ht)) |
        | and sequence parallel | sbh (34/t + 5as/(ht)) |
        | recompute="attention" ("selective") | without 5as/(ht) |
        | recompute="layers" ("full") | 2sbh |

        Those of the embedding and of the loss are left out, as there. An attention that never
        stores its (s, s) scores (`scaled_dot_product_attention`) is like recompute="attention".
        Raises ValueError for numbers below 1, or an unknown `recompute`.
        """
        if not (batch >= 1 and tensor_parallel >= 1):
            raise ValueError(
                f"batch and tensor_parallel are 1 or more, not {batch} and {tensor_parallel}"
            )
        if recompute not in RECOMPUTE:
            raise ValueError(f"recompute must be one of {', '.join(RECOMPUTE)}, not {recompute!r}")
        s, b, a, h, t = self.length, batch, self.heads, self.width, tensor_parallel
        whole = 10 / t if sequence_parallel else 10  # layer norms, dropouts and inputs
        scores = 0 if recompute == "attention" else 5 * a * s / h / t
        layer = 2 if recompute == "layers" else whole + 24 / t + scores
        return self.layers * s * b * h * layer
