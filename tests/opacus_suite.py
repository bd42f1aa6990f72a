"""A plugin of pytest: Opacus's own tests, with this package imported.

``python -m pytest -p tests.opacus_suite --pyargs opacus.tests``. These tests use data
sets and models of torchvision, but none of its kernels: one that was built for another
torch does for them, if the operators that it registers something for exist.
"""

import pytest

import opacus_ext  # noqa: F401  (importing it registers)

from . import vision  # noqa: F401  (torchvision's operators)

# Where this package is meant to do otherwise.
OTHERWISE = {
    "test_custom_linear_hooks": "an attribute of Opacus's own fallback is looked for",
    "test_extra_param_hooks_requires_grad": "the same",
    "test_unsupported_hooks": "the same",
    "test_grad_sample_accumulation": "gradients of whole batches are not computed",
    "PrivacyEngineTextTest::test_make_private_with": "the model attends over the batch",
    "PrivacyEngineTextHooksTest::test_make_private_with": "the same",
    "Embedding_bag_test::test_input_across": "inputs with offsets need take=",
}


def pytest_collection_modifyitems(items):
    for item in items:
        for name, reason in OTHERWISE.items():
            if name in item.nodeid:
                item.add_marker(pytest.mark.xfail(reason=reason, strict=False))
