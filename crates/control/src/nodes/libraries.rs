//! The libraries of functions that a node has.

use std::collections::BTreeMap;

use switchyard_router::is_checked_library;

use super::{Answer, NodeConnection};

/// Libraries of functions: their code by name, and those without the router's check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Functions {
    /// By name.
    pub code: BTreeMap<String, String>,
    /// Those that do not have the router's check.
    pub unchecked: Vec<String>,
}

/// The libraries that a node has.
pub fn functions(connection: &mut NodeConnection) -> Option<Functions> {
    let list = connection.call(&["FUNCTION", "LIST", "WITHCODE"]).ok().filter(|a| a.error().is_none())?;
    let mut functions = Functions::default();
    for library in list.items() {
        let fields: Vec<Answer> = library.items();
        let field = |name: &str| fields.iter().position(|f| f.text() == name).and_then(|at| fields.get(at + 1));
        let (Some(name), Some(code)) = (field("library_name"), field("library_code")) else { continue };
        if !is_checked_library(code.bytes()) {
            functions.unchecked.push(name.text());
        }
        functions.code.insert(name.text(), code.text());
    }
    Some(functions)
}
