//! Asking before a change.

use std::io::{self, BufRead as _, IsTerminal as _, Write as _};

use super::exit::CommandError;

/// Where an answer can come from; a value so that it can be tested without a terminal.
#[derive(Debug, Clone, Copy)]
pub struct Confirm {
    pub yes: bool,
    pub on_terminal: bool,
}

impl Confirm {
    pub fn new(yes: bool) -> Self {
        Self {
            yes,
            // The question goes to stderr, so both ends of the talk must be a person.
            on_terminal: io::stdin().is_terminal() && io::stderr().is_terminal(),
        }
    }

    /// `what` completes "About to …"; `why` says why it is asked.
    pub fn ask(&self, what: &str, why: &str) -> anyhow::Result<()> {
        if self.yes {
            return Ok(());
        }
        if !self.on_terminal {
            return Err(CommandError::refused(
                format!("did not {what}"),
                format!("{why}, and there is no terminal to ask on"),
                "add --yes if this is what you want",
            )
            .into());
        }
        let mut stderr = io::stderr().lock();
        write!(stderr, "About to {what} ({why}).\nGo on? [y/N] ")?;
        stderr.flush()?;
        let mut answer = String::new();
        io::stdin().lock().read_line(&mut answer)?;
        if matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes") {
            Ok(())
        } else {
            Err(CommandError::refused(
                format!("did not {what}"),
                "the answer was not yes",
                "run it again and answer y, or add --yes",
            )
            .into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_terminal_only_yes_goes_on() {
        let ask = |yes| {
            let on_terminal = false;
            Confirm { yes, on_terminal }.ask("drop it", "it cannot be undone")
        };
        assert!(ask(true).is_ok());
        let error = ask(false).unwrap_err();
        assert_eq!(super::super::ExitCode::of(&error) as u8, 4);
        assert!(error.to_string().contains("no terminal"), "{error}");
    }
}
