//! Fuzz target: any bytes as a script and as a library.

use std::sync::LazyLock;

use super::prelude::NOT_UNDERSTOOD;
use super::{UndeclaredKeys, Verdict, analyse, syntax, unwrapped_library, wrapped_library, wrapped_script};
use switchyard_resp::command::CommandTable;

static TABLE: LazyLock<CommandTable> = LazyLock::new(CommandTable::builtin);

/// Checks that a script gets the same verdict if only its white space changes, that preludes are valid Lua on one line,
/// and that the check of a library can be removed again.
///
/// # Panics
/// If one of these is wrong.
pub fn lua(body: &[u8]) {
    let verdict = analyse(body, &TABLE, &UndeclaredKeys::Slot(None));
    assert_eq!(
        analyse(&[body, b"\n"].concat(), &TABLE, &UndeclaredKeys::Slot(None)),
        verdict,
        "with one more line end"
    );
    match (&verdict, analyse(body, &TABLE, &UndeclaredKeys::Nothing)) {
        (Verdict::Wrapped(_), Verdict::Wrapped(stricter)) => {
            for prelude in [prelude_of(&verdict), Some(&*stricter)].into_iter().flatten() {
                assert!(!prelude.contains('\n'), "lines of errors would change");
                let [shebang, prelude, text, end] = wrapped_script(body, prelude);
                assert!(syntax::read(&[prelude, end].concat(), &TABLE).is_some(), "{}", prelude.escape_ascii());
                assert_eq!([shebang, text].concat(), body);
            }
        }
        (verdict, other) => assert_eq!(*verdict, other, "undeclared keys only affect the check"),
    }
    let original = unwrapped_library(body).unwrap_or_else(|| body.to_vec());
    let verdict = analyse(&original, &TABLE, &UndeclaredKeys::Slot(None));
    let wrapped = wrapped_library(body, &TABLE, None);
    assert_eq!(wrapped.is_err(), matches!(verdict, Verdict::Refused(_)));
    // No server stores a library that registers nothing, or one without a line end after its first line.
    let is_stored = prelude_of(&verdict) != Some(NOT_UNDERSTOOD) && original.contains(&b'\n');
    if let Ok(wrapped) = wrapped
        && is_stored
    {
        assert_eq!(unwrapped_library(&wrapped), Some(original));
        assert_eq!(wrapped_library(&wrapped, &TABLE, None), Ok(wrapped), "wrapped twice");
    }
}

fn prelude_of(verdict: &Verdict) -> Option<&str> {
    if let Verdict::Wrapped(prelude) = verdict { Some(prelude) } else { None }
}
