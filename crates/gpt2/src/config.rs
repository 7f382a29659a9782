//! The four sizes of GPT-2.

/// Sizes of a GPT-2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// name on the command line
    pub name: &'static str,
    /// transformer blocks
    pub layers: usize,
    /// attention heads
    pub heads: usize,
    /// width of the residual stream
    pub hidden: usize,
    /// tokens
    pub vocabulary: usize,
    /// longest sequence
    pub context: usize,
}

/// A name that is none of GPT-2's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown model `{0}`; expected gpt2, gpt2-medium, gpt2-large or gpt2-xl")]
pub struct UnknownModel(pub String);

impl Config {
    /// 124 million parameters.
    pub const SMALL: Config = Config::sized("gpt2", 12, 12, 768);
    /// 355 million parameters.
    pub const MEDIUM: Config = Config::sized("gpt2-medium", 24, 16, 1024);
    /// 774 million parameters.
    pub const LARGE: Config = Config::sized("gpt2-large", 36, 20, 1280);
    /// 1558 million parameters.
    pub const XL: Config = Config::sized("gpt2-xl", 48, 25, 1600);
    /// All sizes.
    pub const ALL: [Config; 4] = [Config::SMALL, Config::MEDIUM, Config::LARGE, Config::XL];

    const fn sized(name: &'static str, layers: usize, heads: usize, hidden: usize) -> Config {
        Config { name, layers, heads, hidden, vocabulary: 50257, context: 1024 }
    }

    /// The size of a name.
    pub fn find(name: &str) -> Result<Config, UnknownModel> {
        Config::ALL.into_iter().find(|config| config.name == name).ok_or_else(|| UnknownModel(name.to_string()))
    }

    /// Features of one head.
    pub fn head(&self) -> usize {
        self.hidden / self.heads
    }

    /// Number of parameters, the tied head counted once.
    pub fn parameters(&self) -> usize {
        let c = self.hidden;
        let block = 12 * c * c + 13 * c;
        self.layers * block + (self.vocabulary + self.context) * c + 2 * c
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_those_of_the_published_models() {
        let millions: Vec<usize> = Config::ALL.iter().map(|config| config.parameters() / 1_000_000).collect();
        assert_eq!(millions, [124, 354, 774, 1557]);
    }
}
