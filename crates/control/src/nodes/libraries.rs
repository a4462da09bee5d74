//! Function libraries of a node.

use std::collections::BTreeMap;

use switchyard_router::is_checked_library;

use super::{Answer, NodeConnection};

/// Code of function libraries by name, and libraries without the router's check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Functions {
    /// Code by name.
    pub code: BTreeMap<String, String>,
    /// Names of libraries without the router's check.
    pub unchecked: Vec<String>,
}

/// Returns a node's libraries. `None` if it does not reply or refuses.
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
