"""Sources whose mutual information at every distance is known exactly, in nats."""

import numpy as np

from phasewise.lens.dependency import Curve, log_spaced

FAR = log_spaced(16_384)


def entropy(probabilities):
    positive = probabilities[probabilities > 0]
    return float(-(positive * np.log(positive)).sum())


def information_of(joint):
    """Mutual information of a joint distribution [k, k], as a sum of three entropies."""
    return entropy(joint.sum(0)) + entropy(joint.sum(1)) - entropy(joint.ravel())


def independent(tokens, *, classes, seed):
    """Tokens of uneven probabilities that know nothing of one another: 0 at every distance."""
    weights = 1 / np.arange(1, classes + 1)
    return (
        np.random.default_rng(seed).choice(classes, size=tokens, p=weights / weights.sum()).astype(np.uint8)
    )


def markov(tokens, transition, *, seed):
    """A stationary chain with that transition matrix [k, k]."""
    random = np.random.default_rng(seed)
    steps = transition.cumsum(1)
    state = int(random.choice(len(transition), p=stationary(transition)))
    chain = np.empty(tokens, dtype=np.uint8)
    for place, draw in enumerate(random.random(tokens).tolist()):
        chain[place] = state
        state = int(np.searchsorted(steps[state], draw * steps[state, -1], side="right"))
    return chain


def stationary(transition):
    values, vectors = np.linalg.eig(transition.T)
    vector = np.real(vectors[:, np.argmax(np.real(values))])
    return vector / vector.sum()


def markov_information(transition, distance):
    start = stationary(transition)
    return information_of(start[:, None] * np.linalg.matrix_power(transition, distance))


def copied(tokens, *, lag, classes, seed):
    """Runs of `lag` fresh tokens, each followed by its copy: half of the pairs `lag` apart are equal."""
    fresh = np.random.default_rng(seed).integers(0, classes, (tokens // (2 * lag), lag), dtype=np.uint8)
    return np.concatenate([fresh, fresh], axis=1).reshape(-1)


def copied_information(classes):
    joint = np.full((classes, classes), 0.5 / classes**2) + np.eye(classes) * 0.5 / classes
    return information_of(joint)


def signs(tokens, correlation, *, seed, documents=1):
    """Signs of stationary Gaussian sequences [documents * tokens] with correlation[r] at distance r.

    correlation: float [tokens + 1], convex and decreasing (so that its circular form is a covariance: Polya).
    """
    random = np.random.default_rng(seed)
    circular = np.concatenate([correlation, correlation[-2:0:-1]])
    power = np.fft.rfft(circular).real
    assert power.min() > -1e-6 * power.max()
    white = np.fft.rfft(random.standard_normal((documents, len(circular))), axis=1)
    drawn = np.fft.irfft(white * np.sqrt(np.maximum(power, 0)), n=len(circular), axis=1)
    return (drawn[:, :tokens] > 0).astype(np.uint8).reshape(-1)


def signs_information(correlation):
    """Of two signs whose Gaussians have that correlation: equal with probability 1/2 + asin(rho) / pi."""
    equal = 0.5 + np.arcsin(np.asarray(correlation)) / np.pi
    return np.log(2) + equal * np.log(equal) + (1 - equal) * np.log(1 - equal)


def curve_of(distances, value, *, error=1e-6, seed=0, blocks=32):
    """A curve of that value whose blocks scatter so that its standard error is about `error`."""
    distances = np.asarray(distances)
    value = np.broadcast_to(np.asarray(value, dtype=float), distances.shape)
    scatter = np.random.default_rng(seed).standard_normal((blocks, len(distances))) * error * blocks**0.5
    shares = np.full((blocks, len(distances)), 1 / blocks)
    parts = (value + scatter - scatter.mean(0)) / blocks
    return Curve(
        distances, np.full(len(distances), 10**6), parts, shares, np.zeros(len(distances)), "documents"
    )
