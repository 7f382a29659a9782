//! Recognises activations among the primitives they were expanded into: one function instead of ten operations.

use deuteron_graph::{Activation, BinaryOp, UnaryOp};

use crate::body::{Body, Expr, ExprId};

/// The activation that ends at an expression, and its argument, if nothing else reads its interior. ReLU is
/// never recognised: it is one operation already. `uses` are [`Body::use_counts`].
pub(crate) fn activation(body: &Body, uses: &[usize], id: ExprId) -> Option<(Activation, ExprId)> {
    let (x, gate) = binary(body, BinaryOp::Mul, id)?;
    if uses[gate.index()] != 1 {
        return None;
    }
    if body.expr(gate) == Expr::Unary(UnaryOp::Sigmoid, x) {
        return Some((Activation::Silu, x));
    }
    if is_gelu_tanh_gate(body, x, gate) {
        return Some((Activation::GeluTanh, x));
    }
    let (whole, half) = binary(body, BinaryOp::Mul, x)?;
    let matches = is_constant(body, half, 0.5) && is_gelu_erf_gate(body, uses, whole, gate);
    (matches && uses[x.index()] == 1).then_some((Activation::GeluErf, whole))
}

/// The gradient of GELU's tanh form that ends at an expression: (incoming gradient, argument of GELU). As
/// differentiation leaves it: `g s + t slope f + u + u`, where `s` is the gate, `f = 0.044715 x^2 + 1`,
/// `t = (g x) (s (1 - s))` and `u = t (slope x) 0.044715 x`.
pub(crate) fn gelu_tanh_gradient(body: &Body, uses: &[usize], id: ExprId) -> Option<(ExprId, ExprId)> {
    let (most, twice) = binary(body, BinaryOp::Add, id)?;
    let (first, once) = binary(body, BinaryOp::Add, most)?;
    let (direct, steep_part) = binary(body, BinaryOp::Add, first)?;
    let (g, gate) = binary(body, BinaryOp::Mul, direct)?;
    let (with_factor, slope) = binary(body, BinaryOp::Mul, steep_part)?;
    let (t, factor) = binary(body, BinaryOp::Mul, with_factor)?;
    let (u_rest, x) = binary(body, BinaryOp::Mul, once)?;
    let (u_steep, cubic) = binary(body, BinaryOp::Mul, u_rest)?;
    let (t_again, steep) = binary(body, BinaryOp::Mul, u_steep)?;
    let (g_x, bell) = binary(body, BinaryOp::Mul, t)?;
    let (s, rest) = binary(body, BinaryOp::Mul, bell)?;
    let (one, s_again) = binary(body, BinaryOp::Sub, rest)?;
    let shape = once == twice && t == t_again && s == gate && s_again == gate && is_constant(body, one, 1.0);
    let products = binary(body, BinaryOp::Mul, g_x)? == (g, x) && binary(body, BinaryOp::Mul, steep)? == (x, slope);
    let constants = is_constant(body, slope, slope_of_gelu()) && is_constant(body, cubic, 0.044715);
    let inside = is_gelu_tanh_gate(body, x, gate) && binary(body, BinaryOp::Add, factor).is_some();
    // Whoever else reads something inside would need it computed anyway.
    let own = uses[once.index()] == 2 && [most, first, direct, steep_part, bell].iter().all(|e| uses[e.index()] == 1);
    (shape && products && constants && inside && own).then_some((g, x))
}

/// `2 sqrt(2/pi)`
fn slope_of_gelu() -> f64 {
    2.0 * (2.0 / std::f64::consts::PI).sqrt()
}

/// The operands of a binary operation, if an expression is that.
pub(crate) fn binary(body: &Body, op: BinaryOp, id: ExprId) -> Option<(ExprId, ExprId)> {
    match body.expr(id) {
        Expr::Binary(found, a, b) if found == op => Some((a, b)),
        _ => None,
    }
}

/// `sigmoid((x slope) (0.044715 x^2 + 1))`
fn is_gelu_tanh_gate(body: &Body, x: ExprId, gate: ExprId) -> bool {
    let matched = || {
        let Expr::Unary(UnaryOp::Sigmoid, argument) = body.expr(gate) else { return None };
        let (steep, factor) = binary(body, BinaryOp::Mul, argument)?;
        let (steep_x, slope) = binary(body, BinaryOp::Mul, steep)?;
        let (scaled, one) = binary(body, BinaryOp::Add, factor)?;
        let (square, cubic) = binary(body, BinaryOp::Mul, scaled)?;
        let (a, b) = binary(body, BinaryOp::Mul, square)?;
        let constants = is_constant(body, slope, slope_of_gelu()) && is_constant(body, cubic, 0.044715);
        Some(constants && is_constant(body, one, 1.0) && steep_x == x && a == x && b == x)
    };
    matched().unwrap_or(false)
}

/// `erf(x / sqrt 2) + 1`
fn is_gelu_erf_gate(body: &Body, uses: &[usize], x: ExprId, gate: ExprId) -> bool {
    let matched = || {
        let (erf, one) = binary(body, BinaryOp::Add, gate)?;
        let Expr::Unary(UnaryOp::Erf, scaled) = body.expr(erf) else { return None };
        let (scaled_x, root) = binary(body, BinaryOp::Mul, scaled)?;
        let constants = is_constant(body, one, 1.0) && is_constant(body, root, std::f64::consts::FRAC_1_SQRT_2);
        Some(constants && scaled_x == x && uses[erf.index()] == 1)
    };
    matched().unwrap_or(false)
}

fn is_constant(body: &Body, id: ExprId, value: f64) -> bool {
    body.expr(id) == Expr::Const((value as f32).to_bits())
}
