//! How well a model predicts a text.

use deuteron::{Session, SessionOptions, Tensor};

use crate::gpt2::{Error, Gpt2};
use crate::model::{Options, loss};

/// The loss of a text: of each of its tokens except the first.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prediction {
    /// tokens that were predicted
    pub tokens: usize,
    /// the sum of their cross entropies, in nats
    pub nats: f64,
}

impl Prediction {
    /// The mean cross entropy of a token, in nats.
    pub fn loss(&self) -> f64 {
        self.nats / self.tokens as f64
    }

    /// The exponential of the mean cross entropy.
    pub fn perplexity(&self) -> f64 {
        self.loss().exp()
    }
}

impl Gpt2 {
    /// Predicts each token of a text except the first, from those before it in its window. Windows have the length of the model's context and do
    /// not overlap. `on_window` gets the number of tokens that were predicted so far.
    pub fn predict(&self, tokens: &[u32], mut on_window: impl FnMut(usize)) -> Result<Prediction, Error> {
        let (vocabulary, context) = (self.config().vocabulary, self.config().context);
        if tokens.len() < 2 {
            return Err(Error::Short { got: tokens.len() });
        }
        if let Some(&token) = tokens.iter().find(|&&token| token as usize >= vocabulary) {
            return Err(Error::Token { prompt: 0, token, vocabulary });
        }
        let (mut prediction, mut compiled) = (Prediction { tokens: 0, nats: 0.0 }, None);
        for start in (0..tokens.len() - 1).step_by(context) {
            let sequence = context.min(tokens.len() - 1 - start);
            let session = match &mut compiled {
                Some((length, session)) if *length == sequence => session,
                // The last window may be shorter.
                other => &mut other.insert((sequence, self.losses(sequence)?)).1,
            };
            let window =
                |from: usize| -> Vec<i32> { tokens[from..from + sequence].iter().map(|&id| id as i32).collect() };
            let data = |from: usize| Tensor::from_i32([1, sequence], &window(from));
            let (ids, targets) = (data(start)?, data(start + 1)?);
            let inputs: Vec<&Tensor> = [&ids].into_iter().chain(self.weights()).chain([&targets]).collect();
            session.run(&inputs)?;
            let mean = session.output(0)?.to_f32()?[0];
            prediction.nats += f64::from(mean) * sequence as f64;
            prediction.tokens += sequence;
            on_window(prediction.tokens);
        }
        Ok(prediction)
    }

    /// The mean loss of a sequence of this length.
    fn losses(&self, sequence: usize) -> Result<Session, Error> {
        let options = Options { batch: 1, sequence, weights: self.kind(), backward: false };
        let graph = loss(self.config(), &options, 0.0).map_err(deuteron::Error::from)?;
        Ok(Session::new(self.engine(), &graph, SessionOptions::from(self.strategy()))?)
    }
}
