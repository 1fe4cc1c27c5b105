"""aftermap inside other libraries: scikit-learn, Hugging Face and Lightning.

Each is a module of its own and needs its package only when it is imported:

- `aftermap.integrations.sklearn`: `BayesianClassifier` and `BayesianRegressor`;
- `aftermap.integrations.huggingface`: sequence classifiers and LoRA adapters, saved beside the model;
- `aftermap.integrations.lightning`: callbacks that fit and save, and gradient accumulation for the optimisers.
"""

from __future__ import annotations

__all__: list[str] = []
