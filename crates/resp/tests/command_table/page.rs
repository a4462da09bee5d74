//! Compares `docs/results/compatibility.md`, which is generated from the table, with the handling of every command.

use std::collections::BTreeMap;
use std::path::Path;

use switchyard_resp::command::{CommandTable, Flags, Handling, Keys, Merge, Split};

/// Text for a handling, with its sort position.
fn words(handling: Handling) -> (u8, String) {
    match handling {
        Handling::Keyed => (0, "the owner of its keys".into()),
        Handling::Split(Split::Values | Split::Pairs | Split::Count) => {
            (1, "the owners of its keys, each for its part".into())
        }
        Handling::Every(Merge::Sum) => (2, "every node; the numbers are added".into()),
        Handling::Every(Merge::Least) => (2, "every node; the smallest number counts".into()),
        Handling::Every(Merge::Texts) => (2, "every node; the texts are listed by node".into()),
        Handling::Every(Merge::Figures) => (2, "every node; counts are added, ratios computed from the sums".into()),
        Handling::Every(Merge::Concat) => (2, "every node; the lists are concatenated".into()),
        Handling::Every(Merge::AllOnes) => (2, "every node; 1 if all return 1".into()),
        Handling::Every(Merge::AnyOk) => (2, "every node; one success is enough".into()),
        Handling::Every(_) => (2, "every node; all must agree".into()),
        Handling::Any => (3, "any one node".into()),
        Handling::Local(_) => (4, "Switchyard, with data of the nodes if needed".into()),
        Handling::OnlyNode(reason) => (5, format!("the only node; refused with several: {reason}")),
        Handling::Refused(reason) => (6, format!("refused: {reason}")),
    }
}

fn section() -> String {
    let table = CommandTable::builtin();
    let mut groups: BTreeMap<(u8, String), Vec<String>> = BTreeMap::new();
    for command in table.iter() {
        // Containers themselves are omitted; their subcommands are listed.
        let container =
            table.iter().any(|c| c.name.strip_prefix(&*command.name).is_some_and(|rest| rest.starts_with('|')));
        if container
            && command.keys == Keys::None
            && !command.flags.has(Flags::READONLY)
            && command.handling == Handling::Any
            && command.name != "COMMAND"
        {
            continue;
        }
        groups.entry(words(command.handling)).or_default().push(command.name.replace('|', " "));
    }
    let mut text = String::from("| Answered by | Commands |\n|---|---|\n");
    for ((_, who), mut names) in groups {
        names.sort();
        text.push_str(&format!("| {who} | {} |\n", names.join(", ")));
    }
    text
}

#[test]
fn the_page_lists_the_handling_of_every_command() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results/compatibility.md");
    let page = std::fs::read_to_string(&path).expect("docs/results/compatibility.md");
    let (start, end) = ("<!-- commands: made by a test -->\n", "<!-- end of commands -->");
    let (before, rest) = page.split_once(start).expect("the start of the table");
    let (now, after) = rest.split_once(end).expect("the end of the table");
    let table = section();
    if now != table && std::env::var_os("SWITCHYARD_WRITE_DOCS").is_some() {
        std::fs::write(&path, format!("{before}{start}{table}{end}{after}")).expect("writing the page");
        return;
    }
    assert_eq!(now, table, "run the tests once with SWITCHYARD_WRITE_DOCS=1 to regenerate the table");
}
