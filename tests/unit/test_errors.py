import inspect

from qinfer import errors


def tree() -> list[type[errors.QinferError]]:
    classes = [item for _, item in inspect.getmembers(errors, inspect.isclass)]
    return [item for item in classes if issubclass(item, errors.QinferError)]


def test_there_is_one_tree_and_every_error_says_what_it_means() -> None:
    defined = [name for name, item in vars(errors).items() if inspect.isclass(item)]
    assert sorted(defined) == sorted(error.__name__ for error in tree())
    assert all(error.__doc__ for error in tree())


def test_every_error_ends_the_command_with_a_failure_code() -> None:
    assert all(1 <= error.exit_code < 64 for error in tree())


def test_kinds_that_scripts_tell_apart_have_codes_of_their_own() -> None:
    kinds = [
        errors.QinferError,
        errors.ConfigError,
        errors.CheckpointError,
        errors.QuantizationError,
        errors.NonFiniteError,
        errors.CapacityError,
        errors.MethodMismatchError,
        errors.LimitExceededError,
    ]
    assert len({kind.exit_code for kind in kinds}) == len(kinds)


def test_a_request_error_names_its_field() -> None:
    error = errors.RequestError("top_p is 2", field="top_p")
    assert (str(error), error.field) == ("top_p is 2", "top_p")
    assert errors.ContextLengthError("too long").field is None
