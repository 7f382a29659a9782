//! Generates text from a prompt, one token at a time.

use std::ops::ControlFlow;

use crate::cache::Cache;
use crate::gpt2::{Error, Gpt2};
use crate::sampler::{Sampler, Sampling};

/// What to generate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GenerateOptions {
    /// maximum number of tokens per prompt
    pub max_tokens: usize,
    /// how tokens are chosen; prompt `i` samples with the seed plus `i`, so that equal prompts give different texts
    pub sampling: Sampling,
    /// the token that ends a text, if one does
    pub end_of_text: Option<u32>,
}

/// Why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// the model generated the end-of-text token
    EndOfText,
    /// the maximum number of tokens was reached
    MaxTokens,
    /// the last token has no position left
    ContextFull,
    /// the caller stopped it
    Interrupted,
}

/// The continuation of a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generation {
    /// without the prompt, and without the token that ends a text
    pub tokens: Vec<u32>,
    /// why it ended
    pub stop: Stop,
}

impl Gpt2 {
    /// Continues prompts of any lengths, together; each ends on its own. `on_token` gets the prompt's index and the token as
    /// soon as it is chosen, and may stop the generation.
    pub fn generate(
        &mut self,
        prompts: &[Vec<u32>],
        options: &GenerateOptions,
        mut on_token: impl FnMut(usize, u32) -> ControlFlow<()>,
    ) -> Result<Vec<Generation>, Error> {
        self.check(prompts)?;
        let context = self.config().context;
        let mut texts: Vec<Text> =
            (0..).zip(prompts).map(|(index, prompt)| Text::new(prompt, index, options)).collect::<Result<_, _>>()?;
        let mut members: Vec<usize> = (0..texts.len()).collect();
        let mut cache: Option<Cache> = None;
        loop {
            // Those that have ended leave the batch. A smaller one is compiled in a tenth of a step (GPT-2, two cores).
            let open: Vec<usize> = (0..texts.len()).filter(|&index| texts[index].stop.is_none()).collect();
            if open.is_empty() {
                break;
            }
            let logits = match &mut cache {
                None => {
                    let sequences: Vec<&[u32]> = open.iter().map(|&index| &*texts[index].tokens).collect();
                    let (logits, started) = self.start(&sequences)?;
                    cache = Some(started);
                    logits
                }
                Some(cache) => {
                    if open.len() < members.len() {
                        let kept = |index: &usize| members.iter().position(|member| member == index);
                        let kept: Vec<usize> = open.iter().filter_map(kept).collect();
                        *cache = self.keep(cache, &kept)?;
                    }
                    let tokens: Vec<u32> =
                        open.iter().filter_map(|&index| texts[index].tokens.last().copied()).collect();
                    self.next(cache, &tokens)?
                }
            };
            members.clone_from(&open);
            for (&index, logits) in open.iter().zip(&logits) {
                let Some(token) = texts[index].next(logits, options, context)? else { continue };
                if on_token(index, token).is_break() {
                    return Ok(texts.into_iter().map(Text::finish).collect());
                }
            }
        }
        Ok(texts.into_iter().map(Text::finish).collect())
    }
}

/// A prompt and its continuation so far.
struct Text {
    tokens: Vec<u32>,
    prompt: usize,
    sampler: Sampler,
    stop: Option<Stop>,
}

impl Text {
    fn new(prompt: &[u32], index: u64, options: &GenerateOptions) -> Result<Text, Error> {
        let seed = options.sampling.seed.wrapping_add(index);
        let sampler = Sampler::new(Sampling { seed, ..options.sampling })?;
        let stop = (options.max_tokens == 0).then_some(Stop::MaxTokens);
        Ok(Text { tokens: prompt.to_vec(), prompt: prompt.len(), sampler, stop })
    }

    /// The next token, unless it is the end.
    fn next(&mut self, logits: &[f32], options: &GenerateOptions, context: usize) -> Result<Option<u32>, Error> {
        let token = self.sampler.next(logits)?;
        if options.end_of_text == Some(token) {
            self.stop = Some(Stop::EndOfText);
            return Ok(None);
        }
        self.tokens.push(token);
        if self.tokens.len() - self.prompt == options.max_tokens {
            self.stop = Some(Stop::MaxTokens);
        } else if self.tokens.len() > context {
            self.stop = Some(Stop::ContextFull);
        }
        Ok(Some(token))
    }

    fn finish(mut self) -> Generation {
        let tokens = self.tokens.split_off(self.prompt);
        Generation { tokens, stop: self.stop.unwrap_or(Stop::Interrupted) }
    }
}
