"""Estimators of scikit-learn with a Bayesian network inside; their public path is `bayesify.sklearn`."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from bayesify.batches import run
from bayesify.conversion.convert import convert
from bayesify.conversion.select import Methods
from bayesify.errors import BayesifyError
from bayesify.methods import Rank1
from bayesify.prediction.calibrate import FEWEST_TARGETS
from bayesify.prediction.gaussian import Gaussian
from bayesify.prediction.likelihood import Categorical, Likelihood
from bayesify.prediction.predict import predict
from bayesify.prediction.results import Classification, Prediction, Regression
from bayesify.prediction.samples import components, methods_of
from bayesify.training.objective import elbo, parameter_groups

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.preprocessing import StandardScaler
    from sklearn.utils import Bunch, check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, check_scalar, validate_data
except ImportError as error:
    message = f"bayesify.sklearn needs scikit-learn 1.6 or later ({error}): pip install 'bayesify[sklearn]'"
    raise ImportError(message) from error

Network = nn.Module | Callable[[int, int], nn.Module]
Rows = tuple[Tensor, Tensor]

POSTERIOR_RATE = 10.0
"""How many times as large as that of the weights the learning rate of the posterior is, as docs/choose.md has it."""
VALIDATION_DRAWS = 4  # at least, after each epoch
LARGEST_NORM = 1.0  # of a gradient, which grows with the precision of real targets
ROWS_AT_ONCE = 4096  # in a prediction, so that its memory does not grow with the number of rows


@dataclass(eq=False, repr=False)  # which scikit-learn does itself
class _BayesianEstimator(BaseEstimator):  # type: ignore[misc]
    """What classifier and regressor have in common: training, and the prediction of rows."""

    network: Network | None = None
    method: Methods | None = None
    _: KW_ONLY
    hidden: int | Sequence[int] = (64, 64)
    epochs: int = 200
    batch_size: int = 64
    lr: float = 1e-3
    posterior_lr: float | None = None
    weight_decay: float = 1e-2
    kl_weight: float = 1.0
    mixture: Literal["assign", "replicate"] = "assign"
    validation: float = 0.1
    patience: int = 20
    samples: int | None = None
    random_state: Any = None
    _default_method: ClassVar[Methods] = Rank1()

    def _train(self, X: np.ndarray, y: np.ndarray, outputs: int, likelihood: Likelihood) -> None:
        """Train and calibrate on rows X with targets y (rows,) of classes or (rows, targets) of standardised reals."""
        random = check_random_state(self.random_state)
        training, validation = _split(y, self.validation, random)
        self.inputs_ = StandardScaler().fit(X[training])
        x = torch.from_numpy(self.inputs_.transform(X)).float()
        targets = torch.from_numpy(y)
        parts = [(x[rows], targets[rows]) for rows in map(torch.from_numpy, (training, validation))]
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(random.randint(2**31 - 1))
            method = self._default_method if self.method is None else self.method
            network = convert(self._plain_network(x[:2], outputs), method)
            self.validation_nll_ = self._fit_epochs(network, likelihood, *parts)
        self._calibrate(network.eval(), likelihood, *parts[1])
        # In float64, so that the prediction of a row does not depend on the rows beside it.
        self.network_, self.likelihood_ = network.double(), likelihood.double()

    def _check_options(self) -> None:
        """Raise for numbers out of their range; NumPy's integers, as grids have them, are integers too."""
        for name, least in {"epochs": 1, "batch_size": 2, "patience": 1}.items():
            check_scalar(getattr(self, name), name, Integral, min_val=least)
        for name, bounds in {"lr": "neither", "weight_decay": "left", "kl_weight": "left"}.items():
            check_scalar(getattr(self, name), name, Real, min_val=0, include_boundaries=bounds)
        check_scalar(self.validation, "validation", Real, min_val=0, max_val=1, include_boundaries="left")

    def _plain_network(self, x: Tensor, outputs: int) -> nn.Module:
        """A network of its own for these inputs: the estimator's parameters must not change."""
        network: nn.Module
        if self.network is None:
            network = _mlp(x.shape[1], self.hidden, outputs)
        elif isinstance(self.network, nn.Module):
            network = copy.deepcopy(self.network)
        elif callable(self.network):
            network = self.network(x.shape[1], outputs)
        else:
            raise BayesifyError(
                f"network={self.network!r}: expected a torch.nn.Module, or a function of the numbers of features and "
                "outputs that returns one"
            )
        network = network.to("cpu", torch.float32).eval()
        try:
            with torch.no_grad():
                found = tuple(run(network, x).shape)
        except (RuntimeError, ValueError, TypeError) as error:
            raise BayesifyError(f"network does not take inputs of shape {tuple(x.shape)}: {error}") from error
        if found != (len(x), outputs):
            raise BayesifyError(f"network returns outputs of shape {found}; expected {(len(x), outputs)}")
        return network

    def _fit_epochs(self, network: nn.Module, likelihood: Likelihood, training: Rows, validation: Rows) -> list[float]:
        """Train until the validation NLL gets no better, and go back to the best epoch; returns the NLL of each."""
        groups = parameter_groups(
            network,
            lr=self.lr,
            posterior_lr=POSTERIOR_RATE * self.lr if self.posterior_lr is None else self.posterior_lr,
            weight_decay=self.weight_decay,
        )
        if learnt := list(likelihood.parameters()):
            groups.append({"params": learnt, "lr": self.lr, "weight_decay": 0.0})
        optimizer = torch.optim.AdamW(groups)
        trained = nn.ModuleList([network, likelihood])
        found: list[float] = []
        best, state = math.inf, trained.state_dict()  # the tensors themselves: without validation, the last epoch's
        for epoch in range(1, self.epochs + 1):
            loss = self._run_epoch(trained, optimizer, *training)
            if not math.isfinite(loss):
                raise BayesifyError(f"the loss is {loss} after epoch {epoch}; use a smaller lr than {self.lr}")
            if not len(validation[0]):
                continue
            draws = max(VALIDATION_DRAWS, components(methods_of(network)))
            network.eval()
            found.append(_nll(predict(network, validation[0], draws, likelihood=likelihood), validation[1]))
            if found[-1] < best:
                best, state = found[-1], copy.deepcopy(trained.state_dict())
            elif epoch - 1 - int(np.argmin(found)) >= self.patience:
                break
        trained.load_state_dict(state)
        return found

    def _run_epoch(self, trained: nn.ModuleList, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
        network, likelihood = trained.train()
        batches = torch.randperm(len(x)).split(int(self.batch_size))
        for rows in batches:
            if len(rows) < 2 and len(batches) > 1:  # batch norm can't normalise a single row
                continue
            loss = elbo(
                network,
                x[rows],
                y[rows],
                n=len(x),
                likelihood=likelihood,  # type: ignore[arg-type]
                beta=self.kl_weight,
                mixture=self.mixture,
            ).loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trained.parameters(), LARGEST_NORM)
            optimizer.step()
        return float(loss.detach())

    def _calibrate(self, network: nn.Module, likelihood: Any, x: Tensor, y: Tensor) -> None:
        """Set the temperature of classes, or the noise of real targets, by the validation rows."""
        if y.numel() >= (FEWEST_TARGETS if isinstance(likelihood, Gaussian) else 1):
            likelihood.calibrate(predict(network, x, self._samples(), likelihood=likelihood, draws=True), y)

    def _predict(self, X: Any, draws: bool = False) -> Any:
        """The prediction of rows, in standardised units."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        x = torch.from_numpy(self.inputs_.transform(X))
        likelihood: Likelihood = self.likelihood_
        return predict(self.network_, x, self._samples(), likelihood=likelihood, batch_size=ROWS_AT_ONCE, draws=draws)

    def _samples(self) -> int | None:
        return None if self.samples is None else int(self.samples)


class BayesifyClassifier(ClassifierMixin, _BayesianEstimator):  # type: ignore[misc]
    """A classifier of scikit-learn with a Bayesian network inside, early stopping and a calibrated temperature.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> classifier = BayesifyClassifier(epochs=20, lr=0.01, random_state=0).fit(X, y)
    >>> classifier.score(X, y) > 0.9, classifier.predict_proba(X).shape
    (True, (150, 3))

    Args:
        network: A `torch.nn.Module` for standardised inputs (rows, features), which is copied, or a function of the
            numbers of features and of outputs that makes one. By default a perceptron.
        method: What `by.convert` takes: a method or a dict of patterns; `by.Rank1()` by default.
        hidden: The widths of the default network's hidden layers.
        epochs: The largest number of epochs.
        batch_size: The number of rows in a training step.
        lr: The learning rate of AdamW for the network's own weights.
        posterior_lr: That of the posterior; ten times `lr` by default.
        weight_decay: The decay of weights on which the method has no prior.
        kl_weight: The weight of the KL.
        mixture: As in `by.elbo`: "assign" or "replicate".
        validation: The share of rows for early stopping and the temperature; with 0 there is neither.
        patience: Training stops after so many epochs without a better validation NLL. The best epoch is kept.
        samples: The number of draws in a prediction, as in `by.predict`.
        random_state: Seeds the split, the network that `network` makes, and training.

    Attributes:
        classes_: The labels.
        network_: The trained network, for `by.save`, `by.summary` and the like; its inputs are `inputs_.transform(X)`.
        likelihood_: Its likelihood, with the temperature.
        inputs_: What standardises inputs.
        validation_nll_: The negative log-likelihood of the validation rows after each epoch.
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Train on rows X, without missing values, and their labels y.

        Args:
            X: The inputs (rows, features), an array or a data frame of numbers.
            y: The labels (rows,), of at least two classes.

        Returns:
            The classifier.
        """
        self._check_options()
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, index = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise BayesifyError(f"y has one class, {self.classes_[0]!r}; expected at least two classes")
        self._train(X, index, len(self.classes_), Categorical())
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probabilities (rows, classes) in the order of `classes_`: averages over draws."""
        probs = self._predict(X).probs.numpy()
        return np.asarray(probs / probs.sum(1, keepdims=True))

    def predict(self, X: Any) -> np.ndarray:
        """The most probable label of each row."""
        probs = self.predict_proba(X)
        return np.asarray(self.classes_[probs.argmax(1)])

    def predict_uncertainty(self, X: Any) -> Any:
        """The entropy of each row's label in nats (`total`), its mean within draws (`aleatoric`), and their difference.

        Args:
            X: The inputs.

        Returns:
            A dict of arrays (rows,), whose keys `total`, `aleatoric` and `epistemic` are attributes, too. `epistemic`
            is the mutual information of label and draw, which more data would reduce.
        """
        p = self._predict(X)
        return Bunch(total=p.entropy.numpy(), aleatoric=p.aleatoric.numpy(), epistemic=p.epistemic.numpy())


@dataclass(eq=False, repr=False)
class BayesifyRegressor(RegressorMixin, _BayesianEstimator):  # type: ignore[misc]
    """A regressor of scikit-learn with a Bayesian network inside, early stopping and a calibrated noise.

    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True)
    >>> regressor = BayesifyRegressor(epochs=20, lr=0.01, random_state=0).fit(X, y)
    >>> mean, std = regressor.predict(X, return_std=True)
    >>> low, high = regressor.predict_interval(X, 0.9)
    >>> bool(((low < mean) & (mean < high)).all()), mean.shape
    (True, (442,))

    Targets (rows,) or (rows, targets) are standardised inside. Options and attributes are those of
    `BayesifyClassifier`, but for these:

    Args:
        method: As there; `by.Rank1(noise=0.1)` by default.
        precision: Of the Gaussian noise: "learned" is one for all inputs, "input" one for each; the network then has
            twice as many outputs, the means and the log-precisions.

    Attributes:
        targets_: What standardises targets.
    """

    precision: Literal["learned", "input"] = field(default="learned", kw_only=True)
    _default_method: ClassVar[Methods] = Rank1(noise=0.1)  # as docs/choose.md advises for real targets

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any) -> Self:
        """Train on rows X, without missing values, and their targets y.

        Args:
            X: The inputs (rows, features), an array or a data frame of numbers.
            y: The real targets (rows,) or (rows, targets).

        Returns:
            The regressor.
        """
        self._check_options()
        if self.precision not in ("learned", "input"):
            raise BayesifyError(f"precision={self.precision!r}: expected 'learned' or 'input'")
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2, multi_output=True, y_numeric=True)
        self._shape = y.shape[1:]
        y = y.reshape(len(y), -1).astype(np.float64)
        self.targets_ = StandardScaler().fit(y)
        outputs = y.shape[1] * (2 if self.precision == "input" else 1)
        self._train(X, self.targets_.transform(y).astype(np.float32), outputs, Gaussian(self.precision))
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The means of the targets, and with `return_std` also their standard deviations, noise included."""
        p = self._predict(X)
        mean = self._shaped(self.targets_.inverse_transform(p.mean.numpy()))
        return (mean, self._spread(p.std)) if return_std else mean

    def predict_interval(self, X: Any, coverage: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """The bounds of the central interval in which a target lies with a probability of `coverage`."""
        low, high = self._predict(X, draws=True).interval(coverage)
        return tuple(self._shaped(self.targets_.inverse_transform(bound.numpy())) for bound in (low, high))  # type: ignore[return-value]

    def predict_uncertainty(self, X: Any) -> Any:
        """Standard deviations in the targets' units: of a target (`total`), of the noise, and of the mean over draws.

        Args:
            X: The inputs.

        Returns:
            A dict of arrays in the shape of the targets, whose keys `total`, `aleatoric` and `epistemic` are
            attributes, too. The squares of the latter two sum to that of the first.
        """
        p = self._predict(X)
        spreads = {"total": p.std, "aleatoric": p.aleatoric_std, "epistemic": p.epistemic_std}
        return Bunch(**{name: self._spread(std) for name, std in spreads.items()})

    def _spread(self, std: Tensor) -> np.ndarray:
        return self._shaped(std.numpy() * self.targets_.scale_)

    def _shaped(self, values: np.ndarray) -> np.ndarray:
        """Values (rows, targets) in the shape that the targets had."""
        return values.reshape(len(values), *self._shape)


def _mlp(features: int, hidden: int | Sequence[int], outputs: int) -> nn.Sequential:
    """A perceptron with ReLU."""
    sizes = [features, *map(int, np.atleast_1d(hidden))]
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))


def _split(y: np.ndarray, share: float, random: Any) -> tuple[np.ndarray, np.ndarray]:
    """The training and the validation rows: evenly spread over the sorted targets."""
    order = random.permutation(len(y))
    order = order[np.argsort(y.reshape(len(y), -1)[order, 0], kind="stable")]
    count = min(round(share * len(y)), len(y) - 1)
    chosen = ((np.arange(count) + random.uniform()) * len(y) / max(count, 1)).astype(int)
    return np.delete(order, chosen), order[chosen]


def _nll(p: Prediction, y: Tensor) -> float:
    """The mean negative log-likelihood of the targets."""
    if isinstance(p, Regression):
        return float(-p.log_prob(y).double().mean())
    assert isinstance(p, Classification)
    return float(-p.log_probs.gather(1, y.unsqueeze(1)).double().mean())
