//! The installed .deb, built from the binary under test, and run as a service by a real systemd.

use crate::support::sandbox;

#[test]
fn the_package_installs_a_service_that_starts_reloads_and_stops() {
    sandbox::run(&sandbox::file("packaging/test.sh"));
}
