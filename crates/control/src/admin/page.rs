//! The start page: state of the router, then a list of paths. A single response without scripts, with all external text
//! escaped.

use std::fmt::Write as _;
use std::path::Path;

use super::moves::{MoveState, MovesReport};
use super::report::{LinkReport, StatusReport};

pub(super) struct Entry {
    pub(super) path: &'static str,
    pub(super) purpose: &'static str,
    /// Whether a GET of the path works without parameters.
    pub(super) is_link: bool,
}

const STYLE: &str = "\
:root{color-scheme:light dark}\
body{font:16px/1.5 system-ui,sans-serif;margin:0 auto;padding:1rem;max-width:60rem;overflow-wrap:anywhere}\
h1{font-size:1.5rem;margin:0}h2{font-size:1.15rem;margin:1.75rem 0 .5rem}\
.state{margin:.75rem 0;padding:.6rem .9rem;border-left:.4rem solid #2a8a3c;background:#2a8a3c22}\
.some{border-color:#b7791f;background:#b7791f22}.none{border-color:#c0392b;background:#c0392b22}\
.state p,.state ul{margin:.2rem 0}\
table{border-collapse:collapse}ul{margin:0;padding-left:1.25rem}\
th,td{text-align:left;vertical-align:top;padding:.3rem 1.5rem .3rem 0;border-bottom:1px solid #8884}\
td.n,th.n{text-align:right}\
code,pre{font:.9em ui-monospace,monospace}pre{overflow-x:auto;padding:.6rem .9rem;background:#8882}\
dt{margin-top:.6rem}dd{margin:0}";

/// Escapes text for HTML.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c => out.push(c),
        }
    }
    out
}

pub(super) fn counted(count: u64, thing: &str) -> String {
    format!("{count} {thing}{}", if count == 1 { "" } else { "s" })
}

/// Renders the page. `token_file` is the generated token's file, if the configuration contains no token.
pub(super) fn page(status: &StatusReport, moves: &MovesReport, token_file: Option<&Path>, entries: &[Entry]) -> String {
    let mut page = String::from(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n",
    );
    let (class, said) = state(status);
    let _ = writeln!(page, "<title>Switchyard: {said}</title>\n<style>{STYLE}</style>\n</head>\n<body>");
    let _ = writeln!(page, "<h1>Switchyard {}</h1>", escaped(&status.version));
    add_state(&mut page, status, (class, said));
    add_nodes(&mut page, status);
    add_moves(&mut page, moves);
    add_paths(&mut page, entries);
    add_token(&mut page, token_file);
    page.push_str("</body>\n</html>\n");
    page
}

/// State of the router, as a CSS class and as text.
fn state(status: &StatusReport) -> (&'static str, &'static str) {
    let readiness = status.readiness();
    match (readiness.is_ready(), readiness.is_complete()) {
        _ if readiness.standby.is_some() => ("some", "waiting as a standby"),
        (true, true) => ("all", "ready"),
        (true, false) => ("some", "ready, but not for every key"),
        (false, _) => ("none", "not ready"),
    }
}

fn add_state(page: &mut String, status: &StatusReport, (class, said): (&str, &str)) {
    let readiness = status.readiness();
    let all = if class == "all" { ": every key can be used" } else { "" };
    let _ = writeln!(page, "<div class=\"state {class}\"><p><strong>This router is {said}</strong>{all}</p>");
    let mut warnings = Vec::new();
    if readiness.draining {
        warnings.push("it is shutting down".to_owned());
    }
    warnings.extend(
        readiness
            .not_ready
            .iter()
            .map(|node| format!("node {} ({}): {}", node.address, counted(node.slots, "slot"), node.reason)),
    );
    warnings.extend(readiness.warnings);
    warnings.extend(readiness.standby);
    if !warnings.is_empty() {
        let items: String = warnings.iter().map(|warning| format!("<li>{}</li>", escaped(warning))).collect();
        let _ = writeln!(page, "<ul>{items}</ul>");
    }
    let minutes = (status.uptime_seconds / 60.0) as u64;
    let up = match (minutes / 1440, minutes / 60 % 24, minutes % 60) {
        (0, 0, 0) => "less than a minute".to_owned(),
        (0, 0, minutes) => counted(minutes, "minute"),
        (0, hours, minutes) => format!("{hours} h {minutes} min"),
        (days, hours, _) => format!("{} {hours} h", counted(days, "day")),
    };
    let _ = writeln!(
        page,
        "<p>Up for {up}; {} connected, {} answered.</p></div>",
        counted(status.clients, "client"),
        counted(status.commands, "command")
    );
}

fn add_nodes(page: &mut String, status: &StatusReport) {
    page.push_str("<h2>Nodes</h2>\n<table>\n<tr><th>Node</th><th class=\"n\">Slots</th><th>State</th></tr>\n");
    for node in &status.nodes {
        let link = match &node.link {
            LinkReport::Up => "up".to_owned(),
            LinkReport::Connecting => "connecting".to_owned(),
            LinkReport::Down { reason } => format!("down: {reason}"),
        };
        let link = std::iter::once(link).chain(node.conditions()).collect::<Vec<_>>().join("; ");
        let drained = if node.drained { ", drained" } else { "" };
        let _ = writeln!(
            page,
            "<tr><td>{}</td><td class=\"n\">{}</td><td>{}{drained}</td></tr>",
            escaped(&node.address),
            node.slots,
            escaped(&link)
        );
    }
    page.push_str("</table>\n");
}

fn add_moves(page: &mut String, moves: &MovesReport) {
    page.push_str("<h2>Moves</h2>\n");
    if moves.moves.is_empty() {
        page.push_str("<p>None is in progress.</p>\n");
        return;
    }
    page.push_str("<ul>\n");
    for of in &moves.moves {
        let paused = if of.state == MoveState::Paused { "paused; " } else { "" };
        let _ = writeln!(
            page,
            "<li>Move {} from {} to {}: {} of {}, {:.0} %; {paused}{}</li>",
            of.id,
            escaped(&of.from),
            escaped(&of.to),
            of.slots_done,
            counted(of.slots, "slot"),
            of.percent,
            escaped(&of.activity)
        );
    }
    page.push_str("</ul>\n");
}

fn add_paths(page: &mut String, entries: &[Entry]) {
    page.push_str("<h2>Paths</h2>\n<dl>\n");
    for Entry { path, purpose, is_link } in entries {
        let shown = if *is_link { format!("<a href=\"{path}\">{path}</a>") } else { (*path).to_owned() };
        let _ = writeln!(page, "<dt><code>{shown}</code></dt><dd>{}</dd>", escaped(purpose));
    }
    page.push_str("</dl>\n");
}

fn add_token(page: &mut String, token_file: Option<&Path>) {
    page.push_str("<h2>The token</h2>\n");
    match token_file {
        Some(file) => {
            let file = escaped(&file.display().to_string());
            let _ = writeln!(
                page,
                "<p>Paths marked POST need the token in <code>{file}</code>. The switchyard command reads it itself. By hand:</p>\n\
                 <pre>curl -X POST -H \"Authorization: Bearer $(cat {file})\" ADDRESS/PATH</pre>"
            );
        }
        None => page.push_str(
            "<p>All paths except health checks need the token of the configuration (<code>[admin] token-file</code>). By hand:</p>\n\
             <pre>curl -H \"Authorization: Bearer TOKEN\" ADDRESS/PATH</pre>\n",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn external_text_is_escaped() {
        assert_eq!(escaped("a<b>&\"c\""), "a&lt;b&gt;&amp;&quot;c&quot;");
    }
}
