//! Runs the commands of the guides literally.
//!
//! Blocks with ```` ```sh ```` are run. Blocks with ```` ```toml FILE ```` (or ````
//! ```ini FILE ````) are written to the file. ```` ```sh by-hand ```` is skipped. Preconditions, and checks between
//! steps, are in comments that begin with `<!-- sandbox`.

use crate::support::sandbox;

/// Converts a guide to a script.
fn script(page: &str) -> String {
    let mut script = String::from(
        "set -euo pipefail\nfail() { echo \"FAILED: $*\" >&2; journalctl --no-pager -u switchyard | tail -n 50 >&2; exit 1; }\n\
         dpkg --install ./*.deb >/dev/null 2>&1\n",
    );
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        let mut until = |end: &str| {
            lines.by_ref().take_while(|line| *line != end).map(|line| format!("{line}\n")).collect::<String>()
        };
        if line == "<!-- sandbox" {
            script += &until("-->");
        } else if let Some(info) = line.strip_prefix("```") {
            let block = until("```");
            match info.split_once(' ') {
                Some(("toml" | "ini", file)) => script += &format!("cat >{file} <<'END OF FILE'\n{block}END OF FILE\n"),
                None if info == "sh" => script += &format!("set -x\n{block}{{ set +x; }} 2>/dev/null\n"),
                _ => {}
            }
        }
    }
    script + "echo \"all right\"\n"
}

fn follow(name: &str) {
    let page = std::fs::read_to_string(sandbox::file("docs").join(name)).expect("the guide");
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("guide.sh");
    std::fs::write(&file, script(&page)).expect("written");
    sandbox::run(&file);
}

#[test]
fn code_blocks_of_a_page_become_a_script() {
    let page = "# A\n\n<!-- sandbox\nbefore\n-->\n```toml /etc/x.toml\na = 1\n```\ntext\n```sh\none\ntwo\n```\n```sh by-hand\nnever\n```\n```text\nno\n```\n";
    let script = script(page);
    let rest = script.split_once("2>&1\n").expect("the beginning").1;
    let expected = "before\ncat >/etc/x.toml <<'END OF FILE'\na = 1\nEND OF FILE\nset -x\none\ntwo\n{ set +x; } 2>/dev/null\necho \"all right\"\n";
    assert_eq!(rest, expected);
}

#[test]
fn the_guide_from_one_redis_to_three_and_back_works() {
    follow("one-to-three.md");
}

#[test]
fn the_guide_from_twemproxy_works() {
    follow("from-twemproxy.md");
}

#[test]
fn the_guide_to_clusters_works() {
    follow("clusters.md");
}

#[test]
fn the_guide_to_tls_works() {
    follow("tls.md");
}

#[test]
fn the_guide_to_upgrades_works() {
    follow("upgrade.md");
}

#[test]
fn the_guide_to_backups_and_lost_state_works() {
    follow("backup.md");
}

#[test]
fn the_guide_to_dead_servers_works() {
    follow("dead-server.md");
}

#[test]
fn the_guide_to_related_keys_works() {
    follow("any-keys.md");
}

#[test]
fn the_guide_to_standbys_works() {
    follow("high-availability.md");
}
