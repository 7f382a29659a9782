//! Attention, projection, residual and norm in fewer and fewer launches: one graph, with pinned fusions.

use deuteron_graph::{Callee, Composite, Graph};
use deuteron_plan::{Pin, Target, atoms};

use crate::error::Error;

/// A division of a graph into launches.
pub(super) struct Cut {
    /// how many launches
    pub name: String,
    /// what they are
    pub about: String,
    /// the pins that produce them
    pub pins: Vec<Pin>,
}

/// The end of a graph: names of consecutive operations, in steps of at most one launch each.
pub(super) struct Chain {
    /// attention first, then its projection, if there is one, the residual, the norm
    steps: Vec<Vec<String>>,
}

impl Chain {
    /// None for a graph that does not end with attention, residual and norm.
    pub fn of(graph: &Graph, target: Target) -> Result<Option<Chain>, Error> {
        let mut steps: Vec<Vec<String>> = Vec::new();
        for nodes in atoms(graph, target)? {
            let call = graph.node(nodes[0]).call;
            let name = graph.call_name(call);
            let attends = matches!(graph.calls()[call.index()].callee, Callee::Composite(Composite::Attention { .. }));
            match steps.last_mut() {
                None if !attends => {}
                // Heads are put together by the step that they come from; parts of a call are one step.
                Some(last) if name == "reshape" || last[0] == name => last.push(name.into_owned()),
                _ => steps.push(vec![name.into_owned()]),
            }
        }
        let follows = |names: &[&str]| steps.iter().skip(1).map(|step| step[0].as_str()).eq(names.iter().copied());
        let norms = ["layer_norm", "rms_norm"];
        let is_chain = norms.iter().any(|norm| follows(&["add", norm]) || follows(&["linear", "add", norm]));
        Ok(is_chain.then_some(Chain { steps }))
    }

    /// The number of steps.
    pub fn steps(&self) -> usize {
        self.steps.len()
    }

    /// All in one launch.
    pub fn one(&self) -> Vec<Pin> {
        self.cut(self.steps.len()).pins
    }

    /// Attention as a launch of its own, and the best plan for the rest.
    pub fn apart(&self) -> Vec<Pin> {
        self.steps.windows(2).take(1).map(boundary).collect()
    }

    /// The last `count` steps in one launch, and each step before them in its own.
    pub fn cut(&self, together: usize) -> Cut {
        let (before, last) = self.steps.split_at(self.steps.len() - together);
        let last = [last.concat()];
        let launches: Vec<Vec<String>> = before.iter().chain(&last).cloned().collect();
        let whole = launches.iter().filter(|names| names.len() > 1).cloned().map(Pin::Force);
        let pins = whole.chain(launches.windows(2).map(boundary)).collect();
        let about = launches.iter().map(|names| {
            let mut names = names.clone();
            names.dedup();
            names.join(" + ")
        });
        let about = about.collect::<Vec<String>>().join(", ");
        let name = match launches.len() {
            1 => "one launch".to_string(),
            count => format!("{count} launches"),
        };
        Cut { name, about, pins }
    }
}

/// Forbids fusing the last operation of one launch with the first of the next.
fn boundary(pair: &[Vec<String>]) -> Pin {
    Pin::Forbid(pair[0].last().into_iter().chain(pair[1].first()).cloned().collect())
}
