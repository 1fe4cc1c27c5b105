"""aftermap: Bayesian neural networks in PyTorch.

Your network found the MAP; aftermap finds out what it does not know. Inside, every loss, gradient and factor
is a sum over data of the negative log-likelihood; the number of data, the noise, the temperature and the
prior enter once, when the posterior is formed.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
