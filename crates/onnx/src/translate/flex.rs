//! `FlexAttention`: attention whose scores, or probabilities, a graph of the file changes.

use super::attention::Heads;
use super::call::Results;
use super::scope::Scope;
use super::{Call, Problem, Translator};
use crate::element::Element;
use crate::ir::{Id, Kind};
use crate::schema::GraphProto;
use crate::wire::Reader;

impl<'a> Translator<'a, '_> {
    pub(super) fn flex_attention(&mut self, call: &Call<'a, '_>) -> Results {
        let (q, k, v) = (call.input(0)?, call.input(1)?, call.input(2)?);
        let [of_q, of_k, of_v] = [q, k, v].map(|id| self.ir.shape(id).clone());
        let fits = [&of_q, &of_k, &of_v].iter().all(|shape| shape.rank() == 4)
            && of_q[0] == of_k[0]
            && of_k[..3] == of_v[..3]
            && of_q[3] == of_k[3]
            && of_k[1] > 0
            && of_q[1].is_multiple_of(of_k[1]);
        if !fits {
            let got = self.ir.shapes(&[q, k, v]);
            return Err(Problem::Refused(format!("q [b, h, m, d], k and v [b, g, n, ..] expected, got {got}")));
        }
        let precision = call.int("softmax_precision", 1);
        if !matches!(Element::from_number(precision), Some(Element::F32 | Element::F64)) {
            return Err(Problem::Opaque(format!("a softmax in ONNX element type {precision} is not a primitive")));
        }
        let scale = call.attribute("scale").and_then(|attribute| attribute.float).map(f64::from);
        let changes = ["score_mod", "prob_mod"].map(|name| call.attribute(name).and_then(|attribute| attribute.graph));
        if changes.iter().all(Option::is_none) {
            let heads = Heads { q, k, v, mask: None, is_causal: false, scale };
            return Ok(vec![self.heads(heads)?]);
        }
        let element = self.ir.element(v);
        let (k, v) = (self.repeat_heads(k, of_q[1])?, self.repeat_heads(v, of_q[1])?);
        let scores = self.ir.push(Kind::Matmul { transpose_a: false, transpose_b: true }, &[q, k])?;
        let scores = self.ir.cast(scores, Element::F32)?;
        let mut scores = self.ir.scale(scores, scale.unwrap_or(1.0 / (of_q[3] as f64).sqrt()))?;
        let [of_scores, of_probabilities] = changes;
        if let Some(graph) = of_scores {
            scores = self.changed(call, graph, scores)?;
        }
        let mut probabilities = self.ir.push(Kind::Softmax, &[scores])?;
        if let Some(graph) = of_probabilities {
            probabilities = self.changed(call, graph, probabilities)?;
        }
        let v = self.ir.cast(v, Element::F32)?;
        let y = self.ir.push(Kind::Matmul { transpose_a: false, transpose_b: false }, &[probabilities, v])?;
        Ok(vec![self.ir.cast(y, element)?])
    }

    /// What a graph of one input and one output makes of scores.
    fn changed(&mut self, call: &Call<'a, '_>, graph: Reader<'a>, x: Id) -> Result<Id, Problem> {
        let depth = self.scopes.len();
        let made = self.changed_within(call, graph, x);
        self.scopes.truncate(depth);
        let y = made?;
        if self.ir.shape(y) == self.ir.shape(x) {
            return Ok(self.ir.cast(y, Element::F32)?);
        }
        let (got, expected) = (self.ir.shape(y), self.ir.shape(x));
        Err(Problem::Refused(format!("a graph that gives scores of shape {expected} expected, got {got}")))
    }

    fn changed_within(&mut self, call: &Call<'a, '_>, graph: Reader<'a>, x: Id) -> Result<Id, Problem> {
        self.descend()?;
        self.spend(graph.len() / 64)?;
        let body = GraphProto::read(graph)?;
        if body.inputs.len() != 1 || body.outputs.len() != 1 {
            let (got, given) = (body.inputs.len(), body.outputs.len());
            return Err(Problem::Refused(format!("a graph of one input and output expected, got {got} and {given}")));
        }
        self.scopes.push(Scope::default());
        self.note_infos(&body);
        self.initializers(&body)?;
        let results = self.step(call, &body, &[x])?;
        Ok(results[0])
    }
}
