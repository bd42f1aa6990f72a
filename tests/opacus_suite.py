"""A plugin of pytest: Opacus's own tests, with this package imported.

``python -m pytest -p tests.opacus_suite --pyargs opacus.tests``. These tests use data
sets and models of torchvision, but none of its kernels: one that was built for another
torch does for them, if the operators that it registers something for exist.
"""

import pytest

import opacus_ext  # noqa: F401  (importing it registers)

from . import vision  # noqa: F401  (torchvision's operators)

_FALLBACK = "an attribute of Opacus's own fallback is looked for, which nobody needs"
_EW = 'mode "ew" is "hooks" of this package, which trains what the test has refused'
_BATCH_FIRST = "the test leaves out batch_first=False: its inputs are refused"
_PRV = 'epsilon of "prv" is an upper bound without the margin of 0.01 that Opacus adds'
# Where this package is meant to do otherwise: one that passes is an error, too, and so
# is a name that no test has.
OTHERWISE = {
    "PrivacyEngineValidationTest::test_custom_linear_hooks": _FALLBACK,
    "PrivacyEngineValidationTest::test_extra_param_hooks_requires_grad": _FALLBACK,
    "PrivacyEngineValidationTest::test_unsupported_hooks": _FALLBACK,
    "PrivacyEngineValidationTest::test_extra_param_ew": _EW,
    "PrivacyEngineValidationTest::test_unsupported_ew": _EW,
    "AccountingTest::test_get_noise_multiplier_prv_epochs": _PRV,
    "AccountingTest::test_get_noise_multiplier_prv_steps": _PRV,
    "AdaClipNoiseMultiplierTest::test_privacy_accounting_with_adaclip_e2e": "the class "
    "of Opacus's optimizer is looked for, and ours adapts the bound",
    "PrivacyEngineTextTest::test_make_private_with_epsilon": _BATCH_FIRST,
    "PrivacyEngineTextTestFunctorch::test_make_private_with_epsilon": _BATCH_FIRST,
    "PrivacyEngineTextHooksTest::test_make_private_with_epsilon": _BATCH_FIRST,
    "ModuleValidator_test::test_is_valid_non_learnable_bn": "a BatchNorm without scale "
    "and shift mixes samples as any other",
    "PrivacyEngineSecureModeTest::test_global_seed": "noise has a generator of its own,"
    " and torch.manual_seed in the loop does not repeat it",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    left = set(OTHERWISE)
    for item in items:
        name = item.nodeid.partition(".py::")[2]
        if name in OTHERWISE:
            item.add_marker(pytest.mark.xfail(reason=OTHERWISE[name], strict=True))
            left.discard(name)
    if left and config.args == ["opacus.tests"]:
        raise pytest.UsageError(f"Opacus has no tests {sorted(left)}.")
