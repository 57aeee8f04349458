//! The cluster's shared token, from the environment or a file.
//!
//! The token never stands in a flag, where other users of the machine could read it, nor in the
//! configuration file; it is never shown.

use std::fmt;

use anyhow::{Context as _, Result, bail};
use layercake_protocol::auth::SharedToken;

use crate::config::programs::Common;

/// The variable that hands the token to a child process.
pub(crate) const ENV_TOKEN: &str = "LAYERCAKE_TOKEN";

/// The token as text, for children, and as what connections use.
#[derive(Clone)]
pub(crate) struct Token {
    pub(crate) text: String,
    pub(crate) shared: SharedToken,
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

/// The token that the settings name, if they name one. Contradictions are refused.
pub(crate) fn token(common: &Common) -> Result<Option<Token>> {
    // Empty, it is as good as unset: programs that start others can't always leave a variable out.
    let variable = common.token.as_ref().filter(|text| !text.is_empty());
    let (text, source) = match (variable, &common.token_file) {
        (Some(_), Some(path)) => bail!(
            "both {ENV_TOKEN} and token_file ({}) are set: one token is enough, unset one of them",
            path.display()
        ),
        (None, None) => return Ok(None),
        (Some(text), None) => (text.clone(), ENV_TOKEN.to_owned()),
        (None, Some(path)) => {
            let text = std::fs::read_to_string(path)
                .with_context(|| format!("can't read the token file {}", path.display()))?;
            (text, path.display().to_string())
        }
    };
    if common.insecure {
        bail!("insecure contradicts the token in {source}: unset one of them");
    }
    let shared =
        SharedToken::new(&text).with_context(|| format!("the token in {source} can't be used"))?;
    Ok(Some(Token { text, shared }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn common(token: Option<&str>, insecure: bool) -> Common {
        Common {
            token: token.map(str::to_owned),
            token_file: None,
            insecure,
            log: "warn".into(),
        }
    }

    #[test]
    fn contradictions_and_short_tokens_are_refused_and_tokens_never_shown() {
        let secret = "a secret of some length";
        let token_ = token(&common(Some(secret), false))
            .expect("usable")
            .expect("set");
        assert!(!format!("{token_:?}").contains("secret"));
        assert!(
            token(&common(None, true))
                .expect("no contradiction")
                .is_none()
        );
        for insecure in [false, true] {
            let empty = token(&common(Some(""), insecure)).expect("as good as unset");
            assert!(empty.is_none());
        }
        let error = format!(
            "{:#}",
            token(&common(Some(secret), true)).expect_err("both")
        );
        assert!(
            error.contains("insecure") && !error.contains(secret),
            "{error}"
        );
        let error = format!(
            "{:#}",
            token(&common(Some("short"), false)).expect_err("short")
        );
        assert!(
            error.contains("LAYERCAKE_TOKEN") && error.contains("16"),
            "{error}"
        );
        let both = Common {
            token_file: Some("f".into()),
            ..common(Some(secret), false)
        };
        assert!(token(&both).is_err());
    }
}
