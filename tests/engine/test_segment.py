"""Segments: pieces whose backward is that of autograd, however the whole is cut."""

import pytest
import torch
from torch import Tensor

from pith.engine.segment import Tape


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def mix(x: Tensor, y: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return (x * y).sin() + x[ids], x.exp() @ y.t()


def test_the_backward_of_a_segment_equals_autograd():
    inputs, ids = (draw(3, 3), draw(3, 3, seed=1)), torch.tensor([2, 0, 0])
    grads = (draw(3, 3, seed=2), draw(3, 3, seed=3))
    tape = Tape(recording=True)
    outputs = tape.run(mix, *inputs, ids)
    found = tape.backward(grads)

    leaves = [x.clone().requires_grad_() for x in inputs]
    plain = mix(*leaves, ids)
    wanted = torch.autograd.grad(plain, leaves, grads)
    for one, other in zip((*outputs, *found[:2]), (*plain, *wanted), strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-13, atol=0)
    assert found[2] is None, "ids carry no gradient"


def test_segments_in_a_row_go_backward_from_the_last_to_the_first():
    x, tape = draw(4), Tape(recording=True)
    functions = [lambda x: (x.sin(), 2 * x), lambda a, b: (a * b,), lambda a: (a.exp(),)]
    flowing: tuple[Tensor, ...] = (x,)
    for function in functions:
        flowing = tape.run(function, *flowing)
        assert not any(tensor.requires_grad for tensor in flowing)
    grads = (torch.ones(4, dtype=torch.float64),)
    for _ in functions:
        grads = tape.backward(grads)

    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad((leaf.sin() * 2 * leaf).exp().sum(), leaf)
    torch.testing.assert_close(grads[0], wanted, rtol=1e-13, atol=0)
    assert tape.segments == [], "a segment is released with its backward"


def test_an_output_without_a_gradient_adds_nothing():
    x, tape = draw(3), Tape(recording=True)
    tape.run(lambda x: (x**2, x**3, torch.zeros(3)), x)
    (found,) = tape.backward((None, torch.ones(3).double(), torch.ones(3)))
    torch.testing.assert_close(found, 3 * x**2, rtol=1e-13, atol=0)


def test_an_input_that_the_outputs_do_not_depend_on_has_no_gradient():
    tape = Tape(recording=True)
    tape.run(lambda x, y: (2 * x,), draw(3), draw(3))
    x_grad, y_grad = tape.backward((torch.ones(3).double(),))
    assert x_grad.eq(2).all()
    assert y_grad is None


def test_one_tensor_given_twice_has_a_gradient_at_each_place():
    x, tape = draw(3), Tape(recording=True)
    tape.run(lambda a, b: (2 * a + 5 * b,), x, x)
    a_grad, b_grad = tape.backward((torch.ones(3).double(),))
    assert a_grad.eq(2).all()
    assert b_grad.eq(5).all()


def test_a_segment_that_hands_its_input_on_hands_the_gradient_back():
    x, tape = draw(3), Tape(recording=True)
    (passed,) = tape.run(lambda x: (x,), x)
    assert torch.equal(passed, x)
    assert torch.equal(*tape.backward((draw(3, seed=1),)), draw(3, seed=1))


def test_recording_needs_no_grad_mode_around_it_and_leaves_the_inputs_alone():
    x, tape = draw(3), Tape(recording=True)
    with torch.no_grad():
        tape.run(lambda x: (x**2,), x)
    assert not x.requires_grad
    (found,) = tape.backward((torch.ones(3).double(),))
    assert x.grad is None
    torch.testing.assert_close(found, 2 * x, rtol=1e-13, atol=0)


def test_evaluation_leaves_no_graph_and_nothing_on_the_tape():
    weight, tape = draw(3).requires_grad_(), Tape(recording=False)
    (found,) = tape.run(lambda x: (weight * x,), draw(3, seed=1))
    assert torch.equal(found, weight.detach() * draw(3, seed=1))
    assert found.grad_fn is None
    assert not found.requires_grad
    assert tape.segments == []
    with pytest.raises(IndexError):
        tape.backward((found,))
