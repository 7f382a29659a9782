//! Numbers that explain measurements: Levenberg and Marquardt's method on logarithms, with weights that keep a bad
//! measurement from counting more than two good ones.

/// A number to find: where to start, and its bounds. All positive.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Unknown {
    pub start: f64,
    pub low: f64,
    pub high: f64,
}

/// Log-ratios beyond this count linearly: about 15 %.
const HUBER: f64 = 0.15;

/// The strength of the prior on each number, in log-ratios: a number that no measurement depends on keeps its start.
const PRIOR: f64 = 0.03;

/// Maximum number of steps.
const STEPS: usize = 60;

/// Finds the numbers for which `residuals` (logarithms of predicted over measured) are smallest.
pub(crate) fn fit(unknowns: &[Unknown], residuals: &dyn Fn(&[f64]) -> Vec<f64>) -> Vec<f64> {
    let start: Vec<f64> = unknowns.iter().map(|unknown| unknown.start.ln()).collect();
    let bounded = |logs: &[f64]| -> Vec<f64> {
        logs.iter().zip(unknowns).map(|(&log, unknown)| log.clamp(unknown.low.ln(), unknown.high.ln())).collect()
    };
    let values = |logs: &[f64]| -> Vec<f64> { logs.iter().map(|log| log.exp()).collect() };
    let mut logs = bounded(&start);
    let mut errors = residuals(&values(&logs));
    let mut loss = total(&errors, &logs, &start);
    let mut damping = 1e-2;
    for _ in 0..STEPS {
        let slopes = slopes(&logs, &errors, &|logs| residuals(&values(logs)));
        let (matrix, right) = normal_equations(&slopes, &errors, &logs, &start);
        let before = loss;
        while damping < 1e8 {
            let step = solve(damped(&matrix, damping), right.clone());
            let next =
                bounded(&logs.iter().zip(&step).map(|(log, step)| log + step.clamp(-1.0, 1.0)).collect::<Vec<_>>());
            let next_errors = residuals(&values(&next));
            let next_loss = total(&next_errors, &next, &start);
            if next_loss < loss {
                (logs, errors, loss) = (next, next_errors, next_loss);
                damping = (damping * 0.3).max(1e-9);
                break;
            }
            damping *= 4.0;
        }
        if before - loss < 1e-7 * before {
            break;
        }
    }
    // A logarithm at its bound may come back as a number just beyond it.
    values(&logs).iter().zip(unknowns).map(|(value, unknown)| value.clamp(unknown.low, unknown.high)).collect()
}

fn total(errors: &[f64], logs: &[f64], start: &[f64]) -> f64 {
    let misfit: f64 = errors.iter().map(|&error| huber(error)).sum();
    let moved: f64 = logs.iter().zip(start).map(|(log, start)| (PRIOR * (log - start)).powi(2)).sum();
    misfit + moved
}

fn huber(error: f64) -> f64 {
    let size = error.abs();
    if size <= HUBER { size * size } else { HUBER * (2.0 * size - HUBER) }
}

/// How much each residual changes with each logarithm; a row a number.
fn slopes(logs: &[f64], errors: &[f64], residuals: &dyn Fn(&[f64]) -> Vec<f64>) -> Vec<Vec<f64>> {
    const STEP: f64 = 1e-4;
    let mut shifted = logs.to_vec();
    let mut all = Vec::with_capacity(logs.len());
    for at in 0..logs.len() {
        shifted[at] = logs[at] + STEP;
        all.push(residuals(&shifted).iter().zip(errors).map(|(there, here)| (there - here) / STEP).collect());
        shifted[at] = logs[at];
    }
    all
}

fn normal_equations(slopes: &[Vec<f64>], errors: &[f64], logs: &[f64], start: &[f64]) -> (Vec<Vec<f64>>, Vec<f64>) {
    let weights: Vec<f64> = errors.iter().map(|error| (HUBER / error.abs().max(1e-12)).min(1.0)).collect();
    let dot =
        |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).zip(&weights).map(|((a, b), weight)| a * b * weight).sum() };
    let mut matrix: Vec<Vec<f64>> = slopes.iter().map(|a| slopes.iter().map(|b| dot(a, b)).collect()).collect();
    let mut right: Vec<f64> = slopes.iter().map(|slope| -dot(slope, errors)).collect();
    for at in 0..slopes.len() {
        matrix[at][at] += PRIOR * PRIOR;
        right[at] -= PRIOR * PRIOR * (logs[at] - start[at]);
    }
    (matrix, right)
}

fn damped(matrix: &[Vec<f64>], damping: f64) -> Vec<Vec<f64>> {
    let mut damped = matrix.to_vec();
    (0..damped.len()).for_each(|at| damped[at][at] *= 1.0 + damping);
    damped
}

/// Solves a symmetric positive system by elimination with pivoting.
fn solve(mut matrix: Vec<Vec<f64>>, mut right: Vec<f64>) -> Vec<f64> {
    let size = right.len();
    for column in 0..size {
        let largest = |&row: &usize| matrix[row][column].abs();
        let pivot = (column..size).max_by(|a, b| largest(a).total_cmp(&largest(b))).unwrap_or(column);
        matrix.swap(column, pivot);
        right.swap(column, pivot);
        let pivot_row = matrix[column].clone();
        if pivot_row[column] == 0.0 {
            continue;
        }
        for row in column + 1..size {
            let factor = matrix[row][column] / pivot_row[column];
            matrix[row].iter_mut().zip(&pivot_row).for_each(|(entry, pivot)| *entry -= factor * pivot);
            right[row] -= factor * right[column];
        }
    }
    for column in (0..size).rev() {
        let known: f64 = (column + 1..size).map(|at| matrix[column][at] * right[at]).sum();
        let diagonal = matrix[column][column];
        right[column] = if diagonal == 0.0 { 0.0 } else { (right[column] - known) / diagonal };
    }
    right
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three numbers, forty measurements: `a x + max(b y, c z)`.
    fn predict(values: &[f64], at: usize) -> f64 {
        let (x, y, z) = ((at % 5) as f64 + 0.1, (at % 7) as f64 * 3.0, (at / 7) as f64 * 2.0);
        values[0] * x + (values[1] * y).max(values[2] * z)
    }

    fn planted(bad: &[(usize, f64)]) -> Vec<f64> {
        let truth = [3.0, 0.2, 0.7];
        let mut measured: Vec<f64> = (0..40).map(|at| predict(&truth, at)).collect();
        bad.iter().for_each(|&(at, factor)| measured[at] *= factor);
        let unknowns = [1.0, 1.0, 1.0].map(|start| Unknown { start, low: 0.01, high: 100.0 });
        fit(&unknowns, &|values| (0..40).map(|at| (predict(values, at) / measured[at]).ln()).collect())
    }

    fn assert_near(found: &[f64], within: f64) {
        for (found, truth) in found.iter().zip([3.0, 0.2, 0.7]) {
            assert!((found / truth - 1.0).abs() < within, "{found} is not {truth}");
        }
    }

    #[test]
    fn planted_numbers_are_found() {
        assert_near(&planted(&[]), 0.01);
    }

    #[test]
    fn bad_measurements_do_not_spoil_the_fit() {
        assert_near(&planted(&[(3, 10.0), (17, 4.0), (30, 20.0)]), 0.1);
    }

    #[test]
    fn a_number_that_nothing_depends_on_stays() {
        let unknowns = [Unknown { start: 5.0, low: 0.1, high: 50.0 }, Unknown { start: 1.0, low: 0.1, high: 10.0 }];
        let found = fit(&unknowns, &|values| vec![(values[1] / 2.0).ln(); 8]);
        assert!((found[0] - 5.0).abs() < 1e-9 && (found[1] - 2.0).abs() < 0.02, "{found:?}");
    }

    #[test]
    fn bounds_hold() {
        let found = fit(&[Unknown { start: 1.0, low: 0.5, high: 3.0 }], &|values| vec![(values[0] / 100.0).ln(); 4]);
        assert_eq!(found, [3.0]);
    }
}
